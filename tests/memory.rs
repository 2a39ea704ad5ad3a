//! Freed memory that stays in the process. This is a program of its own, since it changes the allocator of the whole
//! process. It does without cargo's harness, whose threads have heaps of their own before a test begins.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use tch::{Device, Kind, Tensor};
use tch_amp::memory::keep_freed_memory;

use testkit::{resident_bytes, skipped};

const MIB: i64 = 1 << 20;

/// How much more memory is resident after a tensor of 64 MiB was created and dropped.
fn left_behind() -> Option<i64> {
    let before = resident_bytes()?;
    drop(Tensor::ones([16 * MIB], (Kind::Float, Device::Cpu)));
    Some(resident_bytes()? as i64 - before as i64)
}

fn main() {
    // Do not count what libtorch keeps after the first tensor.
    drop(Tensor::ones([16], (Kind::Float, Device::Cpu)));
    let Some(given_back) = left_behind() else {
        return;
    };
    if !keep_freed_memory() {
        return skipped("this C library cannot keep freed memory");
    }
    assert!(given_back < 8 * MIB, "{given_back} bytes were kept before");
    let kept = left_behind().unwrap();
    assert!(kept > 56 * MIB, "only {kept} bytes are kept");
    // glibc takes a little more than is requested, to align it, and caches a few of the small pieces that are left
    // over. As long as it does, a freed block is too short for the next tensor of its size.
    let rounds = |count: usize| (0..count).map(|_| left_behind().unwrap()).sum::<i64>();
    let (first, later) = (rounds(20), rounds(10));
    assert!(first < 20 * 64 * MIB, "no tensor has reused another's memory: {first}");
    assert!(later < 8 * MIB, "{later} more bytes, although {first} are free");
    assert!(keep_freed_memory(), "a second call should succeed, too");
    println!("test freed memory stays in the process once that was asked for ... ok");
}
