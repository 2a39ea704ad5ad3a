//! Faults that `cargo xtask sanitize` must find, each in a process of its own.

use crate::{ffi, sys};

#[test]
#[ignore = "for a build with sanitizers, which find it"]
fn writes_behind_memory() {
    ffi::testing_fault(sys::TESTING_OVERFLOW);
}

#[test]
#[ignore = "for a build with sanitizers, which find it"]
fn writes_to_freed_memory() {
    ffi::testing_fault(sys::TESTING_FREED);
}

#[test]
#[ignore = "for a build with sanitizers, which find it"]
fn overflows_an_integer() {
    ffi::testing_fault(sys::TESTING_UNDEFINED);
}

#[test]
#[ignore = "for a build with sanitizers, which find it"]
fn loses_memory() {
    ffi::testing_fault(sys::TESTING_LEAK);
}
