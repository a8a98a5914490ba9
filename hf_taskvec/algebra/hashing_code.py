"""LLVM's instructions for SHA-256 (FIPS 180-4) of many messages at a time, one in each lane."""

import math
from typing import Any

from llvmlite import ir

from hf_taskvec.algebra.loop_instructions import Loop
from hf_taskvec.algebra.machine_code import WIDTH
from hf_taskvec.algebra.vector_instructions import I32, I64, POINTER, all_lanes, broadcast, vector_of

# Bytes of a message that are worked on at a time, and the 32-bit words that these are.
_CHUNK, _WORDS = 64, 16

_PRIMES = [number for number in range(2, 312) if all(number % other for other in range(2, math.isqrt(number) + 1))]

#: the state before the first chunk, and what is added in each round: bits of square and cube roots of primes
FIRST_STATE = [math.isqrt(prime << 64) & 0xFFFFFFFF for prime in _PRIMES[:8]]
_ROUNDS = [int(prime ** (1 / 3) * 2**32) & 0xFFFFFFFF for prime in _PRIMES]


def hashing_loop() -> ir.Module:
    """A module with the function `loop(count, addresses, states)`: `count` chunks of `WIDTH` messages, at least one.

    Where the next chunk of each message is, is told by the addresses. The states are eight times a word of each
    message, and are replaced.
    """
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64, POINTER, POINTER]), "loop")
    count, addresses, states = function.args
    build = ir.IRBuilder(function.append_basic_block("before"))
    table = ir.GlobalVariable(module, ir.ArrayType(I32, len(_ROUNDS)), "rounds")
    table.global_constant, table.linkage = True, "private"
    table.initializer = ir.Constant(table.value_type, _ROUNDS)
    places = [build.gep(states, [ir.Constant(I64, k)], source_etype=vector_of(I32)) for k in range(len(FIRST_STATE))]
    messages = [
        build.load(build.gep(addresses, [ir.Constant(I64, k)], source_etype=POINTER), typ=POINTER) for k in range(WIDTH)
    ]
    chunks = Loop(build)
    chunk = chunks.carried(ir.Constant(I64, 0))
    before = [build.load(place, typ=vector_of(I32), align=1) for place in places]
    words = _words(build, messages, build.mul(chunk, ir.Constant(I64, _CHUNK)))

    rounds = Loop(build)
    first = rounds.carried(ir.Constant(I64, 0))
    state, present = [rounds.carried(each) for each in before], [rounds.carried(each) for each in words]
    after, coming = _sixteen_rounds(build, table, first, state, present), _scheduled(build, present)
    following = build.add(first, ir.Constant(I64, _WORDS))
    carried = dict(zip((*state, *present), (*after, *coming), strict=True))
    rounds.end({first: following, **carried}, build.icmp_signed("<", following, ir.Constant(I64, len(_ROUNDS))))
    for place, old, new in zip(places, before, after, strict=True):
        build.store(build.add(old, new), place, align=1)
    next_chunk = build.add(chunk, ir.Constant(I64, 1))
    chunks.end({chunk: next_chunk}, build.icmp_signed("<", next_chunk, count))
    build.ret_void()
    return module


def _words(build: ir.IRBuilder, messages: list[Any], offset: Any) -> list[Any]:
    """The words of a chunk, each of all messages, big-endian."""
    assert WIDTH == _WORDS  # so a chunk of each message is a row of a square, which is transposed
    kind, in_bytes = vector_of(I32), ir.VectorType(ir.IntType(8), 4 * WIDTH)
    swapped = ir.Constant(ir.VectorType(I32, 4 * WIDTH), [place ^ 3 for place in range(4 * WIDTH)])
    rows = []
    for each in messages:
        row = build.load(build.gep(each, [offset], source_etype=ir.IntType(8)), typ=in_bytes, align=1)
        rows.append(build.bitcast(build.shuffle_vector(row, row, swapped), kind))
    step = WIDTH // 2
    while step:
        for upper in (each for each in range(WIDTH) if not each & step):
            one, other = rows[upper], rows[upper + step]
            stay = [lane if not lane & step else WIDTH + lane - step for lane in range(WIDTH)]
            cross = [lane + step if not lane & step else WIDTH + lane for lane in range(WIDTH)]
            for row, lanes in ((upper, stay), (upper + step, cross)):
                rows[row] = build.shuffle_vector(one, other, ir.Constant(kind, lanes))
        step //= 2
    return rows


def _sixteen_rounds(build: ir.IRBuilder, table: Any, first: Any, state: list[Any], words: list[Any]) -> list[Any]:
    a, b, c, d, e, f, g, h = state
    for number, word in enumerate(words):
        place = build.add(first, ir.Constant(I64, number))
        added = build.load(build.gep(table, [place], source_etype=I32), typ=I32)
        choice = build.xor(g, build.and_(e, build.xor(f, g)))
        majority = build.xor(a, build.and_(build.xor(a, b), build.xor(a, c)))
        one = build.add(build.add(h, word), build.add(broadcast(build, added), choice))
        one = build.add(one, _mixed(build, e, 6, 11, 25))
        other = build.add(majority, _mixed(build, a, 2, 13, 22))
        a, b, c, d, e, f, g, h = build.add(one, other), a, b, c, build.add(d, one), e, f, g
    return [a, b, c, d, e, f, g, h]


def _scheduled(build: ir.IRBuilder, words: list[Any]) -> list[Any]:
    """The words of the next rounds."""
    words = list(words)
    for number in range(_WORDS):
        one, seven, other = (words[(number + ahead) % _WORDS] for ahead in (1, 9, 14))
        small = build.xor(_mixed(build, one, 7, 18), build.lshr(one, all_lanes(I32, 3)))
        large = build.xor(_mixed(build, other, 17, 19), build.lshr(other, all_lanes(I32, 10)))
        words[number] = build.add(build.add(words[number], small), build.add(seven, large))
    return words


def _mixed(build: ir.IRBuilder, word: Any, *counts: int) -> Any:
    """A word rotated to the right by each count, and these added without carrying."""
    mixed = None
    for count in counts:
        right, left = build.lshr(word, all_lanes(I32, count)), build.shl(word, all_lanes(I32, 32 - count))
        rotated = build.or_(right, left)
        mixed = rotated if mixed is None else build.xor(mixed, rotated)
    return mixed
