//! The pickle in a file in PyTorch's format: a small machine that reads it, and a writer.
//!
//! Reading executes nothing: the pickle can only build a [`Value`](crate::checkpoint::value::Value), and its size is
//! bounded by [`Limits`](crate::checkpoint::limits::Limits).
//!
//! Protocols 2 to 5 of Python's `pickle` are read, and protocol 2 is written. `read` executes the opcodes on the
//! `machine`, with stand-ins for the classes and functions that `globals` lists. `tree` converts the result to a value,
//! of which `write` makes a pickle again. `numpy` makes tensors of numpy's arrays.

pub(crate) mod globals;
mod machine;
mod numpy;
mod read;
mod tree;
mod write;

pub(crate) use machine::{Bytes, Declared};
pub(crate) use read::{First, read, read_first};
pub(crate) use write::write;

/// The opcodes that Python writes in protocols 2 to 5. Those of protocols 3 to 5 are only read.
mod op {
    pub(super) const MARK: u8 = b'(';
    pub(super) const STOP: u8 = b'.';
    pub(super) const NONE: u8 = b'N';
    pub(super) const BININT: u8 = b'J';
    pub(super) const BININT1: u8 = b'K';
    pub(super) const BININT2: u8 = b'M';
    pub(super) const BINFLOAT: u8 = b'G';
    pub(super) const BINUNICODE: u8 = b'X';
    pub(super) const EMPTY_LIST: u8 = b']';
    pub(super) const APPEND: u8 = b'a';
    pub(super) const APPENDS: u8 = b'e';
    pub(super) const EMPTY_TUPLE: u8 = b')';
    pub(super) const TUPLE: u8 = b't';
    pub(super) const EMPTY_DICT: u8 = b'}';
    pub(super) const SETITEM: u8 = b's';
    pub(super) const SETITEMS: u8 = b'u';
    pub(super) const GLOBAL: u8 = b'c';
    pub(super) const REDUCE: u8 = b'R';
    pub(super) const BUILD: u8 = b'b';
    pub(super) const BINPUT: u8 = b'q';
    pub(super) const LONG_BINPUT: u8 = b'r';
    pub(super) const BINGET: u8 = b'h';
    pub(super) const LONG_BINGET: u8 = b'j';
    pub(super) const BINPERSID: u8 = b'Q';
    pub(super) const POP: u8 = b'0';
    pub(super) const POP_MARK: u8 = b'1';
    pub(super) const BINSTRING: u8 = b'T';
    pub(super) const SHORT_BINSTRING: u8 = b'U';

    // Protocol 2.
    pub(super) const PROTO: u8 = 0x80;
    pub(super) const NEWOBJ: u8 = 0x81;
    pub(super) const TUPLE1: u8 = 0x85;
    pub(super) const TUPLE2: u8 = 0x86;
    pub(super) const TUPLE3: u8 = 0x87;
    pub(super) const NEWTRUE: u8 = 0x88;
    pub(super) const NEWFALSE: u8 = 0x89;
    pub(super) const LONG1: u8 = 0x8a;
    pub(super) const LONG4: u8 = 0x8b;

    // Protocol 3.
    pub(super) const BINBYTES: u8 = b'B';
    pub(super) const SHORT_BINBYTES: u8 = b'C';

    // Protocol 4.
    pub(super) const BINUNICODE8: u8 = 0x8d;
    pub(super) const BINBYTES8: u8 = 0x8e;
    pub(super) const EMPTY_SET: u8 = 0x8f;
    pub(super) const ADDITEMS: u8 = 0x90;
    pub(super) const FROZENSET: u8 = 0x91;
    pub(super) const NEWOBJ_EX: u8 = 0x92;
    pub(super) const SHORT_BINUNICODE: u8 = 0x8c;
    pub(super) const STACK_GLOBAL: u8 = 0x93;
    pub(super) const MEMOIZE: u8 = 0x94;
    pub(super) const FRAME: u8 = 0x95;

    // Protocol 5.
    pub(super) const BYTEARRAY8: u8 = 0x96;
}
