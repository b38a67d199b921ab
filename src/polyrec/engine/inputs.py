"""What recorded graphs read of a batch, and the host's memory that it comes from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..hardware.base.attention import PageTable
from ..hardware.base.runtime import Runtime
from ..hardware.ops.search import NodeFilter
from .batching import Batch

HEADS = 5  # lengths, cached tokens, widths, ends of filters, and whether these allow


class BatchInputs:
    """What recorded graphs read of a batch, on the device: filled by one copy, from one thread, in the stream that replays.

    lengths, cached, widths: int64 [places]. table: all prompts'. num_tokens: of the largest recorded prefill.
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
        shape = InputShape(places, -(-max_prompt // page_size), num_tokens)
        self._numbers = torch.zeros(shape.size, dtype=torch.int64, device=device)
        self._token_ids, heads, pages = shape.parts(self._numbers)
        self.lengths, self.cached, self.widths, self._ends, self._allow = heads
        self._nodes = torch.zeros(filter_nodes, dtype=torch.int64, device=device)
        self.table = PageTable(pages, page_size, max_prompt, self.cached)
        self._runtime = runtime
        self._stages = [
            Stage(runtime, shape, self._numbers) for _ in range(2)
        ]  # of the batch that runs, and of the next
        self._turn = 0
        self._places = 0  # of the last batch's requests; nothing is there beyond them
        # Where rehearsals leave what they copy, beside what runs.
        self._aside = runtime.stream()
        self._rehearsed = Stage(runtime, shape, torch.zeros_like(self._numbers))

    def token_ids(self, tokens: int) -> Tensor:
        """int64 [tokens], of the recorded prefill of so many."""
        return self._token_ids[len(self._token_ids) - tokens :]

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
        stage.put(batch, tokens)
        stage.copy(tokens, max(batch.num_requests, self._places))
        self._places = batch.num_requests

    def launched(self) -> None:
        """Whatever reads the batch is queued. The event that lets its stage be filled again is recorded here, where nobody
        waits, and not behind the copy, where the device does."""
        self._stages[self._turn].copied.record(self._runtime.current_stream())
        self._turn = 1 - self._turn

    def rehearse(self, batch: Batch, tokens: int) -> None:
        """As `fill` and `launched`, into memory that nobody reads, beside what the device does."""
        stage = self._rehearsed
        stage.copied.synchronize()
        stage.put(batch, tokens)
        with self._runtime.use_stream(self._aside):
            stage.copy(tokens, batch.num_requests)
            stage.copied.record(self._aside)

    def clear(self) -> None:
        """For a recording: what it computes must reach no prompt's pages, and page 0 takes it."""
        self._numbers.zero_()


class InputShape(NamedTuple):
    """How a batch's inputs lie in one array of numbers: token ids, those of smaller prefills at their end; HEADS numbers a
    place; the places' pages, two of which take one number's room. So what a batch needs of it is one stretch: its prefill's
    token ids, all heads, and the pages of its requests."""

    places: int
    columns: int
    num_tokens: int

    @property
    def size(self) -> int:
        return self.num_tokens + HEADS * self.places + self.places * self._page_numbers

    def stretch(self, tokens: int, places: int) -> slice:
        """What a prefill of so many tokens, and the search behind it, read for so many requests."""
        return slice(self.num_tokens - tokens, self.size - (self.places - places) * self._page_numbers)

    def parts(self, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids int64 [num_tokens], heads int64 [HEADS, places], and pages int32 [places, columns or one more]."""
        tokens, heads, pages = numbers.split((self.num_tokens, HEADS * self.places, self.places * self._page_numbers))
        return tokens, heads.view(HEADS, self.places), pages.view(torch.int32).view(self.places, -1)

    @property
    def _page_numbers(self) -> int:
        return -(-self.columns // 2)


class Stage:
    """Host memory that a batch's inputs are put together in, and from which they are copied to `target`, as many numbers on
    the device. copied: passed when the device has read them.

    Views are made once: made anew, they cost a lone request more than what is done with them.
    """

    def __init__(self, runtime: Runtime, shape: InputShape, target: Tensor) -> None:
        self._shape, self._target = shape, target
        self._numbers = runtime.pin(torch.zeros(shape.size, dtype=torch.int64))
        self.copied = runtime.event()
        self._token_ids, self._heads, self._pages = (part.numpy() for part in shape.parts(self._numbers))
        self._used = 0, 0  # requests and columns of pages that are not zero
        self._filters = False  # whether what says so is not zero
        self._copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def put(self, batch: Batch, tokens: int) -> None:
        """Puts a batch here, with zeros in the places that it leaves. tokens: of the prefill that reads its token ids; 0: none
        does."""
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
            first = self._shape.num_tokens - tokens
            self._token_ids[first : first + len(batch.tokens)] = batch.tokens

    def _put_filter(self, node_filter: NodeFilter | None, requests: int) -> None:
        self._filters = node_filter is not None
        self._heads[3:] = 0
        if node_filter is not None:
            ends = node_filter.ends.numpy()
            self._heads[3, :requests], self._heads[3, requests:] = ends, ends[-1]
            self._heads[4, :requests] = node_filter.allow.numpy()

    def copy(self, tokens: int, places: int) -> None:
        """Queues the copy of a prefill's token ids, of all heads, and of so many places' pages."""
        views = self._copies.get((tokens, places))
        if views is None:
            used = self._shape.stretch(tokens, places)
            views = self._copies[tokens, places] = self._target[used], self._numbers[used]
        views[0].copy_(views[1], non_blocking=True)
