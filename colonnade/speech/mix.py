"""Noise at a signal-to-noise ratio: white, pink, babble of other recordings.

x + n·√(E_x / (E_n·10^(snr/10)))        E: mean square
"""

from collections.abc import Sequence

import numpy as np

from colonnade.errors import DataError

SNRS = (None, 7.5, 2.5, -2.5, -7.5)
"""Signal-to-noise ratios in training [dB]; None is clean."""


def mix(signal: np.ndarray, noise: np.ndarray, snr_db: float) -> np.ndarray:
    """``signal`` with ``noise``, which is repeated to its length."""
    if not len(noise) or not np.isfinite(snr_db):
        raise DataError(f"{len(noise)} samples of noise at {snr_db} dB; use at least one, at a finite ratio")
    noise = np.resize(noise, len(signal)).astype(np.float32)
    power, noise_power = (float(np.mean(np.square(x, dtype=np.float64))) if len(x) else 0.0 for x in (signal, noise))
    if noise_power == 0:
        return signal
    return signal + noise * np.float32(np.sqrt(power / (noise_power * 10 ** (snr_db / 10))))


def white(samples: int, random: np.random.Generator) -> np.ndarray:
    """Equal power at all frequencies."""
    return random.standard_normal(samples).astype(np.float32)


def pink(samples: int, random: np.random.Generator) -> np.ndarray:
    """Power inverse to frequency."""
    size = 1 << max(1, samples - 1).bit_length()  # a power of two: large prime factors are ten times slower
    spectrum = np.fft.rfft(random.standard_normal(size))
    spectrum /= np.sqrt(np.maximum(np.arange(len(spectrum)), 1))
    return np.fft.irfft(spectrum, size)[:samples].astype(np.float32)


def babble(recordings: Sequence[np.ndarray], samples: int, random: np.random.Generator) -> np.ndarray:
    """Mixes 8 to 20 of the recordings with equal power, each from a random position."""
    if not any(len(x) for x in recordings):
        raise DataError("babble needs recordings with samples; add some")
    spoken = [x for x in recordings if len(x)]
    total = np.zeros(samples, np.float32)
    for _ in range(random.integers(8, 21)):
        own = spoken[random.integers(len(spoken))]
        part = np.resize(np.roll(own, random.integers(len(own))), samples).astype(np.float32)
        total += part / max(1e-6, float(np.sqrt(np.mean(np.square(part)))))
    return total
