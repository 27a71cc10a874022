"""Vector instructions for the kernels that numba compiles: those that the compiler does not make of a loop, or only
with tests and copies around them. Each is a function for use within kernels, written in LLVM's instructions.

Integers are int32 and floats fp32. Arrays must be contiguous, because strides are ignored, and have room for whole
vectors of `VECTOR` numbers, which the functions read and write.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core.cgutils import alloca_once_value, for_range, get_or_insert_function
from numba.extending import intrinsic

from pkmlm.kernels.jit import compiled

VECTOR = 16
COMPRESSES = bool(binding.get_host_cpu_features().get("avx512f"))  # whether one instruction packs part of a vector
INTEGER, FLOAT = ir.IntType(32), ir.FloatType()
HIGHEST = (1 << 31) - 1


def instruction(typed: Callable[..., Any]) -> Any:
    """numba's `intrinsic`, typed as Any: by its own types, each call would lack the typing context."""
    return intrinsic(typed)


def _at(context: Any, builder: Any, kind: Any, array: Any, place: Any, number: Any, width: int = VECTOR) -> Any:
    """A pointer to the `width` numbers of an array that begin at `place`."""
    numbers = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(numbers, [place]), ir.VectorType(number, width).as_pointer())


def _filled(builder: Any, number: Any, width: int = VECTOR) -> Any:
    """A vector with one number in all places."""
    vector = ir.Constant(ir.VectorType(number.type, width), ir.Undefined)
    first = builder.insert_element(vector, number, ir.Constant(INTEGER, 0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(INTEGER, width), [0] * width))


def _count(builder: Any, mask: Any) -> Any:
    """How many of a vector's places are set."""
    return builder.zext(builder.ctpop(builder.bitcast(mask, ir.IntType(VECTOR))), ir.IntType(64))


@instruction
def reaching(typingctx: Any, x_n: Any, start: Any, bound: Any) -> Any:
    """How many of the integers x[start : start + VECTOR] reach the bound."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x_n, start, bound = arguments
        x = builder.load(_at(context, builder, signature.args[0], x_n, start, INTEGER), align=4)
        return _count(builder, builder.icmp_signed(">=", x, _filled(builder, bound)))

    return types.int64(x_n, types.int64, types.int32), generate


@instruction
def pack(typingctx: Any, x_n: Any, start: Any, bound: Any, found_m: Any, column_m: Any, found: Any) -> Any:
    """Append those of the integers x[start : start + VECTOR] that reach the bound to found_m[:found], and their columns
    to column_m; return how many there are. For processors with `COMPRESSES`.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start, bound, found = arguments[1], arguments[2], arguments[5]

        def place(which: int, first: Any) -> Any:
            return _at(context, builder, signature.args[which], arguments[which], first, INTEGER)

        x = builder.load(place(0, start), align=4)
        steps = ir.Constant(x.type, list(range(VECTOR)))
        columns = builder.add(_filled(builder, builder.trunc(start, INTEGER)), steps)
        mask = builder.icmp_signed(">=", x, _filled(builder, bound))
        compress = get_or_insert_function(
            builder.module,
            ir.FunctionType(x.type, [x.type, mask.type, x.type]),
            f"llvm.experimental.vector.compress.v{VECTOR}i32",
        )
        for which, whole in ((3, x), (4, columns)):
            packed = builder.call(compress, [whole, mask, ir.Constant(x.type, ir.Undefined)])
            builder.store(packed, place(which, found), align=4)
        return _count(builder, mask)

    return types.int64(x_n, types.int64, types.int32, found_m, column_m, types.int64), generate


def _counting(width: int) -> Any:
    """An instruction of x_m, start, size and above_m: write to above_m[start : start + width] how many of x[:size] are
    greater than each of x[start : start + width]. The counts stay in registers.
    """

    def count(typingctx: Any, x_m: Any, start: Any, size: Any, above_m: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _, start, size, _ = arguments
            own_x, own_above = (
                _at(context, builder, signature.args[which], arguments[which], start, INTEGER, width)
                for which in (0, 3)
            )
            numbers = context.make_array(signature.args[0])(context, builder, arguments[0]).data
            x = builder.load(own_x, align=4)
            above = alloca_once_value(builder, ir.Constant(x.type, [0] * width))
            with for_range(builder, size) as loop:
                other = builder.load(builder.gep(numbers, [loop.index]))
                greater = builder.icmp_signed(">", _filled(builder, other, width), x)
                builder.store(builder.add(builder.load(above), builder.zext(greater, x.type)), above)
            builder.store(builder.load(above), own_above, align=4)
            return context.get_dummy_value()

        return types.void(x_m, types.int64, types.int64, above_m), generate

    return instruction(count)


_count_above_one, _count_above_four = _counting(VECTOR), _counting(4 * VECTOR)


@compiled
def count_above(x_m: Any, size: int, above_m: Any) -> None:
    """above[i] = how many of the integers x[:size] are greater than x[i], for i below the size, in whole vectors."""
    start = 0
    while start + 4 * VECTOR <= size:
        _count_above_four(x_m, start, size, above_m)
        start += 4 * VECTOR
    while start < size:
        _count_above_one(x_m, start, size, above_m)
        start += VECTOR


@instruction
def between(typingctx: Any, low: Any, high: Any) -> Any:
    """The midpoint of two floats, all three as integers in the order of the floats."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def in_order(bits: Any) -> Any:
            negative = builder.ashr(bits, ir.Constant(INTEGER, 31))
            return builder.xor(bits, builder.and_(negative, ir.Constant(INTEGER, HIGHEST)))

        half = ir.Constant(FLOAT, 0.5)
        low, high = (builder.fmul(builder.bitcast(in_order(each), FLOAT), half) for each in arguments)
        return in_order(builder.bitcast(builder.fadd(low, high), INTEGER))

    return types.int32(low, high), generate


@instruction
def add(typingctx: Any, number: Any, x_n: Any, start: Any, sum_m: Any, place: Any) -> Any:
    """sum[place : place + VECTOR] = number + x[start : start + VECTOR], floats."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number, x_n, start, sum_m, place = arguments
        x = builder.load(_at(context, builder, signature.args[1], x_n, start, FLOAT), align=4)
        to_sum = _at(context, builder, signature.args[3], sum_m, place, FLOAT)
        builder.store(builder.fadd(x, _filled(builder, number)), to_sum, align=4)
        return context.get_dummy_value()

    return types.void(number, x_n, types.int64, sum_m, types.int64), generate


def _tangling(width: int) -> Any:
    """An instruction of float a_k, int64 rows_k, float table_nf, sums_nf, x_f and out_f, and int d: for the columns
    d ... d + width - 1, out = sum over j of a[j] * table[rows[j]], and sums[rows[j]] += a[j] * x for each j. These
    columns of x and out stay in registers.
    """

    def tangle(typingctx: Any, a_k: Any, rows_k: Any, table_nf: Any, sums_nf: Any, x_f: Any, out_f: Any, d: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            def data(which: int) -> Any:
                return context.make_array(signature.args[which])(context, builder, arguments[which])

            def place(which: int, first: Any) -> Any:
                return _at(context, builder, signature.args[which], arguments[which], first, FLOAT, width)

            def sum_of(x: Any, y: Any, z: Any) -> Any:
                return builder.fadd(builder.fmul(x, y, flags=("contract",)), z, flags=("contract",))

            d = arguments[6]
            size, columns = builder.extract_value(data(0).shape, 0), builder.extract_value(data(2).shape, 1)
            x = builder.load(place(4, d), align=4)
            out = alloca_once_value(builder, ir.Constant(x.type, [0.0] * width))
            with for_range(builder, size) as loop:
                a = _filled(builder, builder.load(builder.gep(data(0).data, [loop.index])), width)
                row = builder.load(builder.gep(data(1).data, [loop.index]))
                first = builder.add(builder.mul(row, columns), d)
                builder.store(sum_of(a, builder.load(place(2, first), align=4), builder.load(out)), out)
                sums = place(3, first)
                builder.store(sum_of(a, x, builder.load(sums, align=4)), sums, align=4)
            builder.store(builder.load(out), place(5, d), align=4)
            return context.get_dummy_value()

        return types.void(a_k, rows_k, table_nf, sums_nf, x_f, out_f, types.int64), generate

    return instruction(tangle)


_tangle_one, _tangle_four = _tangling(VECTOR), _tangling(4 * VECTOR)


@compiled
def bag_and_outer(a_k: Any, rows_k: Any, table_nf: Any, sums_nf: Any, x_f: Any, out_f: Any) -> None:
    """out = sum over j of a[j] * table[rows[j]], and sums[rows[j]] += a[j] * x for each j; arrays are contiguous."""
    width, d = len(x_f), 0
    while d + 4 * VECTOR <= width:
        _tangle_four(a_k, rows_k, table_nf, sums_nf, x_f, out_f, d)
        d += 4 * VECTOR
    while d + VECTOR <= width:
        _tangle_one(a_k, rows_k, table_nf, sums_nf, x_f, out_f, d)
        d += VECTOR
    for rest in range(d, width):
        total = x_f[rest] * 0
        for j in range(len(a_k)):
            total += a_k[j] * table_nf[rows_k[j], rest]
            sums_nf[rows_k[j], rest] += a_k[j] * x_f[rest]
        out_f[rest] = total
