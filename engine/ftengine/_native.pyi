"""Types of the library built from csrc/."""

from typing import Any

def cpu_features() -> list[str]: ...
def instruction_sets() -> list[str]: ...
def kernel_choice() -> tuple[str, str]: ...
def use_kernels(isa: str, reason: str) -> None: ...
def granted_threads() -> int: ...
def physical_cores() -> list[int]: ...
def read_seconds(data: Any, threads: int, ahead: int = 0) -> float: ...
def pack(
    format: int,
    rows: int,
    columns: int,
    codes: Any,
    scales: Any | None,
    row_scales: Any | None,
    out: Any,
    threads: int = 1,
) -> None: ...
def quantize(format: int, values: Any, second: float, codes: Any, scales: Any, threads: int = 1) -> None: ...
def dequantize(
    format: int,
    rows: int,
    columns: int,
    codes: Any,
    scales: Any | None,
    row_scales: Any | None,
    out: Any,
    threads: int = 1,
) -> None: ...
def linear_packed(
    x: Any,
    data: Any,
    rows: int,
    columns: int,
    format: int,
    out: Any,
    bias: Any | None = None,
    add: bool = False,
    threads: int = 1,
    isa: str = "",
) -> None: ...
def experts_packed(
    hidden: Any,
    expert_ids: Any,
    weights: Any,
    blocks: Any,
    hidden_size: int,
    intermediate: int,
    gate_up_format: int,
    down_format: int,
    bias: bool,
    clamped: bool,
    alpha: float,
    limit: float,
    out: Any,
    threads: int = 1,
    isa: str = "",
) -> None: ...

class Decoder:
    def __init__(
        self, hidden: int, vocabulary: int, dtype: str, frequencies: Any, rotary_scale: float, slice_bytes: int
    ) -> None: ...
    def ends(self, embedding: tuple[Any, ...], head: list[tuple[Any, ...]], norm: Any, epsilon: float) -> None: ...
    def attention(self, **parts: Any) -> None: ...
    def delta_net(self, **parts: Any) -> None: ...
    def feed_forward(self, **parts: Any) -> None: ...
    def use_cache(
        self, page_size: int, keys: list[Any], values: list[Any], windows: list[Any], states: list[Any]
    ) -> None: ...
    def forward(
        self,
        ids: Any,
        positions: Any,
        lengths: list[int],
        contexts: list[int],
        page_table: Any,
        slots: Any,
        state_slots: Any,
        wanted: Any,
        captures: Any,
        logits: Any,
        threads: int,
    ) -> None: ...
    def take_times(self) -> dict[str, float]: ...

class Lane:
    def __init__(
        self,
        banks: list[tuple[Any, int, int, int, int, bool]],
        bell: Any,
        ids: Any,
        weights: Any,
        rows: Any,
        reply: Any,
        out: Any,
        error: Any,
        threads: int,
        patience: float = 0.003,
        isa: str = "",
    ) -> None: ...
    def wake(self) -> None: ...
    def request(self, layer: int, tokens: int, limit: float = 20.0) -> float: ...
    def close(self) -> None: ...
    @property
    def open(self) -> bool: ...
    @property
    def awake(self) -> bool: ...
    def counts(self) -> dict[str, Any]: ...
    def copy_log(self, out: Any) -> int: ...
