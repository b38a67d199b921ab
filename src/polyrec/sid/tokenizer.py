"""Hugging Face tokenizers that hold the SID tokens: a small new one, or an existing one extended. Imports no torch.

Order of the tokens: what was there before, `<s_a_0>…`, `<s_b_0>…`, …, `<|sid_begin|>`, `<|sid_end|>`, without gaps.
They are not marked special, so that decoding keeps them whatever `skip_special_tokens` says.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from ..core.errors import CatalogError, CheckpointError
from ..core.files import atomic_path, read_json, write_json
from .layout import BEGIN, END, SidLayout, code_token

PAD, UNKNOWN = "<|endoftext|>", "<unk>"
MAX_DEPTH = 26  # levels are named by letters
_SID_PATTERN = r"<s_[a-z]_[0-9]+>|<\|sid_(?:begin|end)\|>"
# What may stand beside tokenizer.json and describes the same tokenizer: the chat template above all.
_COMPANIONS = ("chat_template.jinja", "chat_template.json", "special_tokens_map.json", "vocab.json", "merges.txt")


def sid_tokens(codebook_sizes: Sequence[int]) -> list[str]:
    """The texts of all SID tokens in id order: codes by level, then begin and end."""
    if not 1 <= len(codebook_sizes) <= MAX_DEPTH or min(codebook_sizes) < 1:
        raise CatalogError(
            "codebook_sizes_invalid",
            f"Codebook sizes {list(codebook_sizes)}: need 1 to {MAX_DEPTH} levels with at least one code each.",
            "Correct the codebook sizes.",
        )
    codes = [code_token(level, code) for level, size in enumerate(codebook_sizes) for code in range(size)]
    return [*codes, BEGIN, END]


def build_tokenizer(
    codebook_sizes: Sequence[int], specials: Sequence[str] = (), words: Sequence[str] = ()
) -> Tokenizer:
    """A new tokenizer: `<|endoftext|>` (0, padding), `<unk>` (1), `specials`, `words` (plain ones), then the SID tokens.

    Text is split at SID tokens and at white space; a word that is no token is `<unk>`.
    """
    reserved = [PAD, UNKNOWN, *specials]
    texts = [*reserved, *words, *sid_tokens(codebook_sizes)]
    if len(set(texts)) != len(texts):
        raise CatalogError(
            "special_tokens_repeated",
            f"Special tokens {reserved} or words repeat a token.",
            "Give each token its own text.",
        )
    # SID tokens live in the word list, not among the added tokens: tens of thousands of added tokens make the file
    # seven times larger and loading through transformers forty times slower (measured with 3 x 8192 codes).
    vocabulary = {text: token for token, text in enumerate(texts)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_SID_PATTERN), "isolated"), pre_tokenizers.WhitespaceSplit()]
    )
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(reserved)
    return tokenizer


def extend_tokenizer(folder: str | Path, codebook_sizes: Sequence[int]) -> Tokenizer:
    """The tokenizer of a Hugging Face folder with the SID tokens added at its end; old ids do not move.

    Save it with `save_tokenizer(tokenizer, out, source_folder=folder)`, which keeps the chat template and the config.
    """
    tokenizer = load_tokenizer(folder)
    texts = sid_tokens(codebook_sizes)
    known = set(tokenizer.get_vocab())
    if present := [text for text in texts if text in known]:
        raise CatalogError(
            "sid_tokens_present",
            f"The tokenizer in {folder} already has {len(present)} of the SID tokens, the first is {present[0]}.",
            "Extend a tokenizer without SID tokens, or use this one as it is.",
        )
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in texts])
    layout_of(tokenizer)  # proves that the ids came out without gaps
    return tokenizer


def layout_of(tokenizer: Tokenizer) -> SidLayout:
    """Where the SID tokens stand in this tokenizer; gaps and missing tokens are CatalogErrors."""
    return SidLayout.from_vocabulary(tokenizer.get_vocab())


def num_tokens(tokenizer: Tokenizer) -> int:
    """One more than the largest token id: the rows an embedding needs before padding."""
    return max(tokenizer.get_vocab().values()) + 1


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Reads `folder/tokenizer.json`."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            "tokenizer_missing",
            f"No tokenizer.json in {folder}.",
            "Point at a folder with one; `save_pretrained` of a fast transformers tokenizer writes it.",
        )
    try:
        return Tokenizer.from_buffer(path.read_bytes())
    except ValueError as error:
        raise CheckpointError("tokenizer_invalid", f"{path} is no tokenizer: {error}.", "Make it anew.") from error


def save_tokenizer(tokenizer: Tokenizer, folder: str | Path, source_folder: str | Path | None = None) -> None:
    """Writes tokenizer.json and tokenizer_config.json, so that `AutoTokenizer.from_pretrained(folder)` loads them.

    source_folder: where an extended tokenizer came from; its config and chat template come along.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / "tokenizer.json") as temporary:
        tokenizer.save(str(temporary))
    if source_folder is None:
        config = _new_config()
    else:
        config = _extended_config(tokenizer, Path(source_folder))
        for name in _COMPANIONS:
            source = Path(source_folder) / name
            if source.is_file() and source.resolve() != (folder / name).resolve():
                with atomic_path(folder / name) as temporary:
                    shutil.copyfile(source, temporary)
    write_json(folder / "tokenizer_config.json", config)


def _new_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": PAD,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
    }


def _extended_config(tokenizer: Tokenizer, source: Path) -> dict[str, Any]:
    path = source / "tokenizer_config.json"
    config: dict[str, Any] = read_json(path) if path.is_file() else {"tokenizer_class": "PreTrainedTokenizerFast"}
    if "added_tokens_decoder" in config:  # loaders that do not read tokenizer.json find the added tokens here
        for token, added in tokenizer.get_added_tokens_decoder().items():
            config["added_tokens_decoder"].setdefault(
                str(token),
                {
                    "content": added.content,
                    "lstrip": added.lstrip,
                    "normalized": added.normalized,
                    "rstrip": added.rstrip,
                    "single_word": added.single_word,
                    "special": added.special,
                },
            )
    return config
