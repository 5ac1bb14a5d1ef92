"""What the codes and block scales of small formats are as numbers. Source: OCP Microscaling Formats (MX) v1.0."""

from __future__ import annotations

import torch

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX, E4M3_MAX = 6.0, 448.0
SMALLEST_SCALE = 2.0**-126  # a scale of zero would make zeros into NaN


def e2m1_pairs() -> torch.Tensor:
    """[256, 2] float32: what the two columns of a byte are, the low nibble first."""
    values = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])
    byte = torch.arange(256)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=1)


def int4_pairs() -> torch.Tensor:
    """[256, 2] float32, the same for GGUF's nibble - 8."""
    byte = torch.arange(256)
    return torch.stack(((byte & 15) - 8, (byte >> 4) - 8), dim=1).float()


def e4m3(codes: torch.Tensor) -> torch.Tensor:
    """uint8 of any shape -> float32; 0x7f and 0xff are NaN."""
    return codes.view(torch.float8_e4m3fn).float()


def e8m0(codes: torch.Tensor) -> torch.Tensor:
    """uint8 of any shape -> float32 powers of two, 2 ** (byte - 127); 255 is NaN."""
    powers = torch.pow(2.0, torch.arange(-127, 129, dtype=torch.float64)).float()
    powers[255] = torch.nan
    return powers.to(codes.device)[codes.int()]


def nearest_e2m1(values: torch.Tensor) -> torch.Tensor:
    """float32 -> codes 0..15 as uint8, nearest, ties to the even code, beyond 6 saturating."""
    # A value equal to a bound belongs below it; where the tie goes up, the bound is the float just under the tie.
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    upwards = torch.tensor([False, True, False, True, False, True, False])
    bounds = torch.where(upwards, torch.nextafter(ties, torch.zeros(())), ties)
    magnitude = torch.bucketize(values.abs(), bounds, out_int32=True).to(torch.uint8)
    return magnitude | (torch.signbit(values).to(torch.uint8) << 3)
