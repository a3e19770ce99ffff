"""Low-bit floats in NumPy float64, and CPD's gradient sum, without any code of lbopt."""

import numpy as np


def rounded(x, exponent_bits, mantissa_bits, overflow="inf"):
    """Round to nearest even by frexp and rint, with gradual underflow."""
    with np.errstate(invalid="ignore"):
        x = np.asarray(x, np.float64)
    top = 2 ** (exponent_bits - 1) - 1

    with np.errstate(invalid="ignore", over="ignore"):
        exponent = np.maximum(np.frexp(x)[1] - 1, 1 - top)
        unit = np.ldexp(1.0, exponent - mantissa_bits)
        scaled = x / unit
        if mantissa_bits:
            out = np.rint(scaled) * unit
        else:  # ties go up from a power of two, to 0 from below the smallest
            out = np.where(
                np.abs(scaled) >= 1, np.floor(np.abs(scaled) + 0.5), np.ceil(np.abs(scaled) - 0.5)
            )
            out = np.copysign(out, x) * unit

    largest = (2 - 2.0**-mantissa_bits) * 2.0**top
    past = np.abs(out) > largest
    if overflow == "inf":
        out = np.where(past, np.copysign(np.inf, x), out)
    elif overflow == "saturate":
        out = np.where(past & np.isfinite(x), np.copysign(largest, x), out)

    return np.where(np.isfinite(x), out, x)


def cpd_cast(value, exponent_bits, mantissa_bits):
    """Cast one fp32 number as CPD's kernel does, in Python integers."""
    bits = int(np.float32(value).view(np.uint32))
    field = bits >> 23 & 0xFF
    mantissa = bits & 0x7FFFFF
    negative = bits >> 31

    if field == 0xFF or bits & 0x7FFFFFFF == 0:
        return np.float32(value)
    if field == 0:
        return np.float32(0)

    mantissa |= 1 << 23
    bias = (1 << exponent_bits - 1) - 1
    exponent = field - 127 + bias

    if exponent >= (1 << exponent_bits) - 1:
        return np.float32(-np.inf if negative else np.inf)
    if exponent <= 0:
        mantissa >>= 1 - exponent
        exponent = 1

    dropped = 23 - mantissa_bits
    if dropped:
        half = 1 << dropped - 1
        low = mantissa & ((1 << dropped) - 1)
        odd = mantissa >> dropped & 1
        mantissa -= low
        if low > half or (low == half and odd):
            mantissa += 1 << dropped

    with np.errstate(over="ignore"):
        result = np.float32(np.ldexp(mantissa / 2**23, exponent - bias))
    return -result if negative else result


def cpd_sum(rows, exponent_bits, mantissa_bits, kahan=False, shifted=True):
    """Sum the workers' gradients of one layer, [workers, n] fp32, as `sum_gradients` does.

    Without a shift `sum_gradients` leaves the gradients unrounded; here, as in `lbopt.aps`, they
    are rounded before they are sent.
    """

    def q(x):
        return np.array(
            [cpd_cast(value, exponent_bits, mantissa_bits) for value in np.asarray(x, np.float32)],
            np.float32,
        )

    rows = np.asarray(rows, np.float32)
    workers = len(rows)
    shift = 0
    if shifted:
        largest = max(
            np.ceil(np.log2(np.abs(row.astype(np.float64) * workers).max())) for row in rows
        )
        shift = 2 ** (exponent_bits - 1) - 1 - int(largest)
    scaled = [q(np.ldexp(row, shift)) for row in rows]
    total = lost = np.zeros(rows.shape[1], np.float32)
    for row in scaled:
        if kahan:
            y = q(row - lost)
            after = q(total + y)
            lost = q(q(after - total) - y)
            total = after
        else:
            total = q(total + row)
    return np.ldexp(total, -shift)
