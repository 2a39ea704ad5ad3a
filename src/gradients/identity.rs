//! Maps whose keys are tensor identities.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map from tensor identities.
pub(crate) type IdentityMap<T> = HashMap<usize, T, BuildHasherDefault<IdentityHasher>>;

/// Hashes identities, which are addresses and need no protection against an attacker.
#[derive(Debug, Default)]
pub(crate) struct IdentityHasher(u64);

impl Hasher for IdentityHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_usize(byte.into());
        }
    }

    fn write_usize(&mut self, address: usize) {
        // Fibonacci hashing (Knuth): the golden ratio spreads the multiples of an alignment.
        self.0 = (self.0 ^ address as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32);
    }
}
