"""Each format gives the same table; each fault of a file is a DataError with a stable code."""

import gzip
import json

import polars as pl
import pytest

from polyrec.core.errors import DataError
from polyrec.data.readers import collect, read_table

ROWS = [("u1", "007", "1"), ("u1", 'say "hi", you', "2"), ("ü2", "item|x", "3")]
FRAME = pl.DataFrame(ROWS, schema=["user", "item", "time"], orient="row")


def quoted(separator):
    lines = [separator.join(FRAME.columns)]
    lines += [separator.join('"' + v.replace('"', '""') + '"' for v in row) for row in ROWS]
    return "\n".join(lines) + "\n"


def write_all(folder):
    FRAME.write_parquet(folder / "a.parquet")
    (folder / "a.csv").write_text(quoted(","), encoding="utf-8")
    (folder / "semicolon.csv").write_text(quoted(";"), encoding="utf-8")
    (folder / "crlf.csv").write_bytes(quoted(",").replace("\n", "\r\n").encode())
    (folder / "bom.csv").write_bytes(b"\xef\xbb\xbf" + quoted(",").encode())
    (folder / "a.tsv").write_text(quoted("\t"), encoding="utf-8")
    (folder / "table.txt").write_text(quoted("\t"), encoding="utf-8")
    (folder / "a.csv.gz").write_bytes(gzip.compress(quoted(",").encode()))
    lines = [json.dumps(dict(zip(FRAME.columns, row, strict=True)), ensure_ascii=False) for row in ROWS]
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    atomic = ["user:token\titem:token\ttime:float", *("\t".join(row) for row in ROWS)]
    (folder / "a.inter").write_text("\n".join(atomic) + "\n", encoding="utf-8")
    return sorted(folder.iterdir())


def test_every_format_gives_the_same_table(tmp_path):
    paths = write_all(tmp_path)
    assert len(paths) == 11
    for path in paths:
        lazy = read_table(path)
        assert isinstance(lazy, pl.LazyFrame)
        assert collect(lazy, path).rows() == ROWS, path.name


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "cp1252"])
def test_other_encodings_by_name(tmp_path, encoding):
    (tmp_path / "a.csv").write_bytes(quoted(",").encode(encoding))
    assert collect(read_table(tmp_path / "a.csv", encoding=encoding), "a.csv").rows() == ROWS


def test_sequence_lines_keep_their_order(tmp_path):
    path = tmp_path / "sequences.txt"
    path.write_text('1 5 "4" 5\n\n2   9\t\n3 7 8', encoding="utf-8")  # quotes are no quoting; blanks of any width
    assert collect(read_table(path, format="sequence"), path).rows() == [
        ("1", "5"), ("1", '"4"'), ("1", "5"), ("2", "9"), ("3", "7"), ("3", "8"),
    ]  # fmt: skip


def test_a_recbole_item_file_loses_its_types(tmp_path):
    path = tmp_path / "a.item"
    path.write_text("item_id:token\tgenre:token_seq\tprice:float\n1\tcomedy drama\t2.5\n", encoding="utf-8")
    assert collect(read_table(path), path).to_dicts() == [{"item_id": "1", "genre": "comedy drama", "price": "2.5"}]


def test_plain_files_are_scanned_not_read(tmp_path):
    """The plan names the file and only the asked column: nothing was loaded yet."""
    for path in write_all(tmp_path):
        plan = read_table(path).select("user").explain()
        if path.suffix != ".gz":
            assert "SCAN" in plan.upper(), path.name


FAULTS = {
    "missing": ("a.csv", None, "file_missing"),
    "empty": ("a.csv", b"", "file_empty"),
    "blank lines": ("a.csv", b"\n\n", "file_empty"),
    "empty parquet": ("a.parquet", b"", "file_empty"),
    "no parquet": ("a.parquet", b"user,item\n1,2\n", "file_broken"),
    "cut parquet": ("a.parquet", b"PAR1 and nothing more", "file_broken"),
    "unknown suffix": ("a.xlsx", b"PK", "format_unknown"),
    "no suffix": ("events", b"user,item\n", "format_unknown"),
    "latin-1": ("a.csv", "user,item\n1,2\n1,caf\xe9\n".encode("latin-1"), "not_utf8"),
    "cut utf-8": ("a.jsonl", b'{"user": "\xc3', "not_utf8"),
    "too many fields": ("a.csv", b"user,item\n1,2\n1,2,3\n", "file_broken"),
    "broken json": ("a.jsonl", b'{"user": 1}\n{"user": \n', "file_broken"),
    "json of lists": ("a.jsonl", b"[1, 2]\n", "file_broken"),
    "no gzip": ("a.csv.gz", b"user,item\n", "file_broken"),
    "recbole without types": ("a.inter", b"user_id\titem_id\n1\t2\n", "recbole_header"),
    "recbole twice": ("a.inter", b"a:token\ta:float\n1\t2\n", "column_twice"),
    "column twice": ("a.csv", b"user,user\n1,2\n", "column_twice"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_file_is_a_data_error(tmp_path, fault):
    name, content, code = FAULTS[fault]
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        collect(read_table(path), path)
    assert caught.value.code == code
    assert str(path) in caught.value.message
    assert caught.value.remedy


def test_faults_name_their_line(tmp_path):
    for name in ("too many fields", "broken json", "latin-1"):
        file, content, _ = FAULTS[name]
        (tmp_path / file).write_bytes(content)
        with pytest.raises(DataError, match=r"line [23]"):
            collect(read_table(tmp_path / file), tmp_path / file)


def test_folders_and_unknown_words_are_refused(tmp_path):
    for arguments, code in (
        ({"path": tmp_path}, "file_is_folder"),
        ({"path": tmp_path, "format": "exel"}, "format_unknown"),
    ):
        with pytest.raises(DataError) as caught:
            read_table(**arguments)
        assert caught.value.code == code
    (tmp_path / "a.csv").write_text("user,item\n1,2\n")
    with pytest.raises(DataError) as caught:
        read_table(tmp_path / "a.csv", encoding="utf8-ish")
    assert caught.value.code == "encoding_unknown"


def test_a_missing_file_names_its_neighbour(tmp_path):
    (tmp_path / "events.csv").write_text("user,item\n1,2\n")
    with pytest.raises(DataError, match=r"Did you mean 'events\.csv'"):
        read_table(tmp_path / "event.csv")
