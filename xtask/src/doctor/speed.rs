//! The speed of matrix products on the CPU, measured with Python's torch, so that nothing has to be compiled.

use std::path::Path;
use std::process::Command;

use crate::process;

#[path = "../../../src/precision/advice.rs"]
#[allow(dead_code, reason = "the crate uses all of it")]
mod advice;

/// Prints a line for each size: the GFLOP/s in f32, bf16 and fp16, or `-` for products that would take too long.
/// The dtypes take turns, so that a moment in which the machine is busy with something else meets all of them.
const PROGRAM: &str = "
import time, torch
dtypes, slow = (torch.float32, torch.bfloat16, torch.float16), set()
for size in (64, 128, 256, 512, 1024):
    best = {dtype: float('inf') for dtype in dtypes if dtype not in slow}
    matrices = {dtype: torch.ones(size, size, dtype=dtype) for dtype in best}
    start, rounds = time.perf_counter(), 0
    while rounds < 2 or time.perf_counter() - start < 0.05 * len(best):
        for dtype, x in matrices.items():
            if rounds < 2 or best[dtype] <= 0.06:
                a = time.perf_counter()
                x @ x
                best[dtype] = min(best[dtype], time.perf_counter() - a)
        rounds += 1
    slow |= {dtype for dtype in best if best[dtype] > 0.06}
    speeds = [str(2 * size ** 3 / best[dtype] / 1e9) if dtype in best else '-' for dtype in dtypes]
    print(size, *speeds)
";

/// The advice that follows from the measured speeds; `None` if Python cannot measure them.
pub(super) fn advice(python: &Path) -> Option<String> {
    let printed = process::read(Command::new(python).args(["-c", PROGRAM])).ok()?;
    let speeds: Option<Vec<_>> = printed.lines().map(speed).collect();
    Some(advice::advice(&speeds?))
}

fn speed(line: &str) -> Option<advice::MatmulSpeed> {
    let mut words = line.split(' ');
    let size = words.next()?.parse().ok()?;
    let f32 = words.next()?.parse().ok()?;
    let [bf16, fp16] = [words.next()?, words.next()?].map(|word| word.parse().ok());
    Some(advice::MatmulSpeed::new(size, f32, None, bf16, fp16))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_of_the_program_are_read() {
        let line = speed("256 100.5 430.25 -").unwrap();
        assert_eq!(line, advice::MatmulSpeed::new(256, 100.5, None, Some(430.25), None));
        assert_eq!(speed("256 100.5"), None);
        assert_eq!(speed("256 x 1 1"), None);
    }
}
