"""The small matrix product inside attention, written in vectors of 16 for numba.

Left to loops, the compiler asks at every row again whether arrays overlap, which takes longer than the row.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
"""Columns computed side by side: one AVX-512 register of fp32, or two or four smaller ones."""


def _product_of(lanes: int) -> Any:
    """`add(weights, matrix, row, column, depth, sums, into)`: `lanes` columns of a product, added in their place.

    `sums`[:, into : into + lanes] += `weights`[:, :depth] @ `matrix`[row : row + depth, column : column + lanes], fp32; `matrix`
    in fp32 or as bits of bf16. Three rows of sums are carried at once, so that what was loaded and widened serves thrice; a sum's
    order is the same in either case.
    """

    def add(
        typing_context: Any, weights: Any, matrix: Any, row: Any, column: Any, depth: Any, sums: Any, into: Any
    ) -> tuple[Any, Any]:
        signature = types.void(weights, matrix, row, column, depth, sums, into)
        is_bf16 = isinstance(matrix.dtype, types.Integer)
        floats = ir.VectorType(ir.FloatType(), lanes)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            w, m, s = (context.make_array(signature.args[i])(context, builder, arguments[i]) for i in (0, 1, 5))
            top, column, depth, into = (context.cast(builder, arguments[i], signature.args[i], types.intp) for i in (2, 3, 4, 6))

            def at(array: Any, row: Any, column: Any, kind: Any) -> Any:
                across, along = cgutils.unpack_tuple(builder, array.strides)
                start = builder.add(builder.mul(row, across), builder.mul(column, along))
                return cgutils.pointer_add(builder, array.data, start, kind.as_pointer())

            def widened(i: Any) -> Any:
                here = builder.add(top, i)
                if not is_bf16:
                    return builder.load(at(m, here, column, floats), align=4)
                bits = builder.load(at(m, here, column, ir.VectorType(ir.IntType(16), lanes)), align=2)
                words = ir.VectorType(ir.IntType(32), lanes)
                high = builder.shl(builder.zext(bits, words), ir.Constant(words, [16] * lanes))
                return builder.bitcast(high, floats)

            def rows_from(first: Any, count: int) -> None:
                rows = [builder.add(first, ir.Constant(first.type, i)) for i in range(count)]
                places = [at(s, row, into, floats) for row in rows]
                carried = [cgutils.alloca_once_value(builder, builder.load(place, align=4)) for place in places]
                with cgutils.for_range(builder, depth) as loop:
                    values = widened(loop.index)
                    for row, total in zip(rows, carried, strict=True):
                        weight = builder.load(at(w, row, loop.index, ir.FloatType()))
                        spread = builder.insert_element(ir.Constant(floats, ir.Undefined), weight, ir.Constant(ir.IntType(32), 0))
                        spread = builder.shuffle_vector(
                            spread, spread, ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
                        )
                        product = builder.fmul(spread, values, flags=("contract",))
                        builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)
                for place, total in zip(places, carried, strict=True):
                    builder.store(builder.load(total), place, align=4)

            num_rows = cgutils.unpack_tuple(builder, w.shape)[0]
            three = ir.Constant(num_rows.type, 3)
            triples = builder.sdiv(num_rows, three)
            with cgutils.for_range(builder, triples) as loop:
                rows_from(builder.mul(loop.index, three), 3)
            with cgutils.for_range_slice(builder, builder.mul(triples, three), num_rows, ir.Constant(num_rows.type, 1)) as (
                left,
                _,
            ):
                rows_from(left, 1)
            return context.get_dummy_value()

        return signature, generate

    return intrinsic(add)


add_product: Any = _product_of(LANES)
add_half_product: Any = _product_of(LANES // 2)
"""For the last 8 of a head's dimensions where 16 do not divide them."""
