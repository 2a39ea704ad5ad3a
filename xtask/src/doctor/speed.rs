//! The speed of matrix products on the CPU, measured with Python's torch, so that nothing has to be compiled.

use std::path::Path;
use std::process::Command;

use crate::process;

#[path = "../../../src/precision/words.rs"]
#[allow(dead_code, reason = "the crate uses all of it")]
mod words;

/// Prints a line for each size: the GFLOP/s in f32, bf16 and fp16, or `-` for products that would take too long.
const PROGRAM: &str = "
import time, torch
slow = set()
for size in (64, 128, 256, 512, 1024):
    line = [str(size)]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        if dtype in slow:
            line.append('-')
            continue
        x = torch.ones(size, size, dtype=dtype)
        best, start = float('inf'), time.perf_counter()
        while True:
            a = time.perf_counter()
            x @ x
            b = time.perf_counter()
            best = min(best, b - a)
            if b - start > 0.05:
                break
        if best > 0.06:
            slow.add(dtype)
        line.append(str(2 * size ** 3 / best / 1e9))
    print(' '.join(line))
";

/// The advice that follows from the measured speeds; `None` if Python cannot measure them.
pub(super) fn advice(python: &Path) -> Option<String> {
    let printed = process::read(Command::new(python).args(["-c", PROGRAM])).ok()?;
    let speeds: Option<Vec<_>> = printed.lines().map(speed).collect();
    Some(words::advice(&speeds?))
}

fn speed(line: &str) -> Option<words::MatmulSpeed> {
    let mut words = line.split(' ');
    let size = words.next()?.parse().ok()?;
    let f32 = words.next()?.parse().ok()?;
    let [bf16, fp16] = [words.next()?, words.next()?].map(|word| word.parse().ok());
    Some(words::MatmulSpeed::new(size, f32, None, bf16, fp16))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_of_the_program_are_read() {
        let line = speed("256 100.5 430.25 -").unwrap();
        assert_eq!(line, words::MatmulSpeed::new(256, 100.5, None, Some(430.25), None));
        assert_eq!(speed("256 100.5"), None);
        assert_eq!(speed("256 x 1 1"), None);
    }
}
