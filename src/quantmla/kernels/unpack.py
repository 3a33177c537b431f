"""Packed codes to BF16 numbers inside a kernel, in whatever layout the consumer wants.

A row of codes is read as 16-bit words: word w holds channels n*w .. n*w+n-1, n = 16 / bits, lowest
bits first. Field j of all words is a tensor of its own, so nothing is ever shuffled: a product over
channels is a sum of n products over words. On a GPU two words share a 32-bit register, and one LOP3
unpacks field j of both as the BF16 numbers 128 + code.
"""

from __future__ import annotations

import triton
import triton.language as tl

ONE = "0x3f803f80"  # two BF16 1.0
NEGATIVE_ZERO = "0x80008000"  # two BF16 -0.0: x * s + -0.0 keeps the sign of 0
BIAS = "0x43004300"  # two BF16 128.0, whose last mantissa bit is worth 1


@triton.constexpr_function
def field_assembly(bits, j, use):
    """Return the PTX that turns field j of two words into two BF16 numbers.

    Operands: $0 result, $1 words, $2 high bits, $3 -(128 + zero) or -zero, $4 scale.
    """
    unpack = {
        2: "shr.u32 w, $1, {shift}; lop3.b32 w, w, 0x00030003, {bias}, 0xea;",
        3: "shr.u32 w, $1, {shift}; lop3.b32 w, w, 0x00030003, {bias}, 0xea;"
        " shr.u32 h, $2, {j}; and.b32 h, h, 0x00010001; shl.b32 h, h, 2; or.b32 w, w, h;",
        4: "shr.u32 w, $1, {shift}; lop3.b32 w, w, 0x000f000f, {bias}, 0xea;",
        # two nibbles: 128 + low - 128, and 16 * (128 + high) - 2048; every step is exact
        8: "shr.u32 w, $1, {shift}; shr.u32 h, w, 4;"
        " lop3.b32 w, w, 0x000f000f, {bias}, 0xea; lop3.b32 h, h, 0x000f000f, {bias}, 0xea;"
        " .reg .b32 m, c; mov.b32 c, 0xc300c300; fma.rn.bf16x2 w, w, one, c;"
        " mov.b32 m, 0x41804180; mov.b32 c, 0xc500c500; fma.rn.bf16x2 h, h, m, c;"
        " fma.rn.bf16x2 w, w, one, h;",
    }[bits]
    unpack = unpack.replace("{shift}", str((2 if bits == 3 else bits) * j))
    unpack = unpack.replace("{j}", str(j)).replace("{bias}", BIAS)
    return (
        f"{{ // {use}\n.reg .b32 w, h, one, nz; mov.b32 one, {ONE}; mov.b32 nz, {NEGATIVE_ZERO};"
        f" {unpack} fma.rn.bf16x2 w, w, one, $3; fma.rn.bf16x2 $0, w, $4, nz; }}"
    )


@triton.jit
def field(words, high, offset, scale, BITS: tl.constexpr, J: tl.constexpr, USE: tl.constexpr,
          ASM: tl.constexpr):  # fmt: skip
    """Return bf16(scale * (code - zero)) of field J of every word.

    Args:
        words [.., int16]: packed codes; at 3 bits the low two bits of each.
        high [.., int16]: at 3 bits the high bit of each code, in the low byte; else ignored.
        offset [.., bf16]: -(128 + zero), at 8 bits -zero.
        scale [.., bf16]: step.
        BITS, J: width and field.
        USE: text that keeps equal calls for two uses apart, so that each is done in its own layout.
        ASM: packed inline assembly; plain arithmetic otherwise (interpreter).
    """
    if ASM:
        return tl.inline_asm_elementwise(
            field_assembly(BITS, J, USE), "=r,r,r,r,r", [words, high, offset, scale],
            dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    word_bits: tl.constexpr = 2 if BITS == 3 else BITS
    code = (words.to(tl.int32) >> (word_bits * J)) & ((1 << word_bits) - 1)
    if BITS == 3:
        code += ((high.to(tl.int32) >> J) & 1) << 2
    bias: tl.constexpr = 0 if BITS == 8 else 128
    level = (code + bias).to(tl.float32) + offset.to(tl.float32)
    return (level * scale.to(tl.float32)).to(tl.bfloat16)


@triton.constexpr_function
def offset_assembly():
    """Return the PTX that picks two zero points and gives the BF16 numbers -(128 + zero).

    Operands: $0 result, $1 two words of two zero points, $2 and $3 the permutations that would pick
    the same one of both. The byte 0xc3 above a zero point below 128 makes that number.
    """
    return (
        "{ .reg .b32 s, c; mov.b32 c, 0xc3c3c3c3; lop3.b32 s, $2, $3, 0x000000ff, 0xe4;"
        " prmt.b32 $0, $1, c, s; }"
    )


@triton.jit
def zero_offset(zeros, group, slot, BITS: tl.constexpr, ASM: tl.constexpr):
    """Return -(128 + zero) of tokens in a group as BF16, at 8 bits -zero.

    Args:
        zeros: int16 pointer to the zero plane of a blob; word i holds tokens i and i + 32. 8-bit
            loads would cost the operand layout that 16-bit words allow.
        group, slot [broadcastable]: group and token slot.
        BITS: width of the codes.
    """
    word = tl.load(zeros + group * 32 + slot % 32)
    return _offset_of(word, slot // 32, BITS, ASM)


@triton.jit
def few_offsets(zeros, group, slot, BITS: tl.constexpr):
    """Return zero_offset of one group; 32-bit loads, because fewer bytes are not copied ahead."""
    word = tl.load(zeros.to(tl.pointer_type(tl.int32)) + group * 16 + (slot % 32) // 2)
    word = (word >> (16 * (slot % 2) + 8 * (slot // 32))) & 0xFF
    if BITS == 8:
        return (-word.to(tl.float32)).to(tl.bfloat16)
    return (word | -0x3D00).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def few_scales(scales, group, slot):
    """Return the scales of one group by 32-bit loads, because fewer bytes are not copied ahead."""
    word = tl.load(scales.to(tl.pointer_type(tl.int32)) + group * 32 + slot // 2)
    return (word >> (16 * (slot % 2))).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _offset_of(word, half, BITS: tl.constexpr, ASM: tl.constexpr):
    if ASM and BITS != 8:
        half = tl.broadcast_to(0x4240 + half * 0x0101, word.shape)
        return tl.inline_asm_elementwise(
            offset_assembly(), "=r,r,r,r", [word, half], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    zero = (word.to(tl.int32) >> (8 * half)) & 0xFF
    if BITS == 8:
        return (-zero.to(tl.float32)).to(tl.bfloat16)
    # 0xc300 | zero is the BF16 number -(128 + zero)
    return (zero | -0x3D00).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def spread(x, T: tl.constexpr, G: tl.constexpr, W: tl.constexpr):
    """Repeat a value of each group for its W words: [T, G] to [T, G*W]."""
    return tl.reshape(tl.broadcast_to(x[:, :, None], (T, G, W)), (T, G * W))


@triton.jit
def split_fields(x, ROWS: tl.constexpr, WORDS: tl.constexpr, N: tl.constexpr):
    """Split channels [ROWS, WORDS, N] into a tuple of N tensors [ROWS, WORDS], by channel mod N."""
    if N == 1:
        fields = (tl.reshape(x, (ROWS, WORDS)),)
    elif N == 2:
        fields = tl.split(x)
    else:
        half: tl.constexpr = N // 2
        even, odd = tl.split(tl.reshape(x, (ROWS, WORDS, half, 2)))
        even = split_fields(even, ROWS, WORDS, half)
        odd = split_fields(odd, ROWS, WORDS, half)
        fields = ()
        for j in tl.static_range(half):
            fields = fields + (even[j], odd[j])
    return fields


@triton.jit
def join_fields(fields, ROWS: tl.constexpr, WORDS: tl.constexpr, N: tl.constexpr):
    """Return [ROWS, WORDS, N] of N fields: the inverse of split_fields."""
    if N == 1:
        joined = tl.reshape(fields[0], (ROWS, WORDS, 1))
    elif N == 2:
        joined = tl.join(fields[0], fields[1])
    else:
        half: tl.constexpr = N // 2
        even, odd = (), ()
        for j in tl.static_range(half):
            even = even + (fields[2 * j],)
            odd = odd + (fields[2 * j + 1],)
        even = join_fields(even, ROWS, WORDS, half)
        odd = join_fields(odd, ROWS, WORDS, half)
        joined = tl.reshape(tl.join(even, odd), (ROWS, WORDS, N))  # from [.., half, 2]
    return joined
