"""What recorded graphs read of a batch, and the host's memory that it comes from."""

from __future__ import annotations

import torch
from torch import Tensor

from ..hardware.base.attention import PageTable
from ..hardware.base.runtime import Runtime
from ..hardware.ops.search import NodeFilter
from .batching import Batch

HEADS = 5  # lengths, cached tokens, widths, ends of filters, and whether these allow


class BatchInputs:
    """What recorded graphs read of a batch, on the device: filled by one copy, from one thread, in the stream that replays.

    lengths, cached, widths: int64 [places]. table: all prompts'. token_ids: int64 [most tokens of a recorded prefill].
    filter_nodes: room for what filters list.
    """

    def __init__(
        self,
        places: int,
        num_tokens: int,
        filter_nodes: int,
        max_prompt: int,
        page_size: int,
        runtime: Runtime,
        device: torch.device,
    ) -> None:
        shape = places, -(-max_prompt // page_size), num_tokens
        self._numbers = torch.zeros(tokens_at(*shape[:2]) + num_tokens, dtype=torch.int64, device=device)
        heads, pages, self.token_ids = input_parts(self._numbers, *shape)
        self.lengths, self.cached, self.widths, self._ends, self._allow = heads
        self._nodes = torch.zeros(filter_nodes, dtype=torch.int64, device=device)
        self.table = PageTable(pages, page_size, max_prompt, self.cached)
        self._runtime = runtime
        self._stages = [
            Stage(runtime, *shape, self._numbers) for _ in range(2)
        ]  # of the batch that runs, and of the next
        self._turn = 0
        # Where rehearsals leave what they copy, beside what runs.
        self._aside = runtime.stream()
        self._rehearsed = Stage(runtime, *shape, torch.zeros_like(self._numbers))

    def node_filter(self, requests: int) -> NodeFilter:
        """Of the first `requests` places."""
        return NodeFilter(self._nodes, self._ends[:requests], self._allow[:requests])

    def fill(self, batch: Batch, tokens: int) -> None:
        """tokens: of the recorded prefill that reads them; 0: none does. Those behind the batch's own may be anything."""
        if batch.node_filter is not None:
            nodes = batch.node_filter.nodes
            self._nodes[: len(nodes)].copy_(self._runtime.pin(nodes), non_blocking=True)
        stage = self._stages[self._turn]
        stage.copied.synchronize()
        stage.put(batch, tokens=tokens > 0)
        stage.copy(tokens)

    def launched(self) -> None:
        """Whatever reads the batch is queued. The event that lets its stage be filled again is recorded here, where nobody
        waits, and not behind the copy, where the device does."""
        self._stages[self._turn].copied.record(self._runtime.current_stream())
        self._turn = 1 - self._turn

    def rehearse(self, batch: Batch, tokens: int) -> None:
        """As `fill` and `launched`, into memory that nobody reads, beside what the device does."""
        stage = self._rehearsed
        stage.copied.synchronize()
        stage.put(batch, tokens=tokens > 0)
        with self._runtime.use_stream(self._aside):
            stage.copy(tokens)
            stage.copied.record(self._aside)

    def clear(self) -> None:
        """For a recording: what it computes must reach no prompt's pages, and page 0 takes it."""
        self._numbers.zero_()


class Stage:
    """Host memory that a batch's inputs are put together in, and from which they are copied to `target`, as many numbers on
    the device. copied: passed when the device has read them.

    Views are made once: made anew, they cost a lone request more than what is done with them.
    """

    def __init__(self, runtime: Runtime, places: int, columns: int, num_tokens: int, target: Tensor) -> None:
        self._tokens_at, self._target = tokens_at(places, columns), target
        self._numbers = runtime.pin(torch.zeros(self._tokens_at + num_tokens, dtype=torch.int64))
        self.copied = runtime.event()
        parts = input_parts(self._numbers, places, columns, num_tokens)
        self._heads, self._pages, self._token_ids = (part.numpy() for part in parts)
        self._used = 0, 0  # requests and columns of pages that are not zero
        self._filters = False  # whether what says so is not zero
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def put(self, batch: Batch, *, tokens: bool) -> None:
        """Puts a batch here, with zeros in the places that it leaves. tokens: token ids too."""
        requests, columns = batch.pages.shape
        last_requests, last_columns = self._used
        if requests < last_requests:
            self._heads[:, requests:last_requests] = 0
        if requests < last_requests or columns < last_columns:
            self._pages[:last_requests, :last_columns] = 0
        self._heads[:3, :requests] = batch.numbers
        if batch.node_filter is not None or self._filters:
            self._put_filter(batch.node_filter, requests)
        self._pages[:requests, :columns] = batch.pages
        self._used = requests, columns
        if tokens:
            self._token_ids[: len(batch.tokens)] = batch.tokens

    def _put_filter(self, node_filter: NodeFilter | None, requests: int) -> None:
        self._filters = node_filter is not None
        self._heads[3:] = 0
        if node_filter is not None:
            ends = node_filter.ends.numpy()
            self._heads[3, :requests], self._heads[3, requests:] = ends, ends[-1]
            self._heads[4, :requests] = node_filter.allow.numpy()

    def copy(self, tokens: int) -> None:
        """Queues the copy of all but token ids, and of so many of these."""
        views = self._copies.get(tokens)
        if views is None:
            used = self._tokens_at + tokens
            views = self._copies[tokens] = self._target[:used], self._numbers[:used]
        views[0].copy_(views[1], non_blocking=True)


def tokens_at(places: int, columns: int) -> int:
    """Where token ids begin among a batch's numbers: behind HEADS a place, and its pages, two of which take one's room."""
    return HEADS * places + -(-places * columns // 2)


def input_parts(numbers: Tensor, places: int, columns: int, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """int64 [HEADS, places], int32 [places, columns] and int64 [num_tokens], where they lie among the numbers."""
    at = tokens_at(places, columns)
    pages = numbers[HEADS * places : at].view(torch.int32)[: places * columns]
    return numbers[: HEADS * places].view(HEADS, places), pages.view(places, columns), numbers[at : at + num_tokens]
