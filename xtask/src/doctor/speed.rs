//! The speed of matrix products on the CPU, measured with Python's torch, so that nothing has to be compiled.

use std::path::Path;
use std::process::Command;

use crate::process;

/// The speed of square matrix products of one size, in GFLOP/s.
#[derive(Debug, PartialEq)]
struct MatmulSpeed {
    /// The number of rows and of columns.
    size: i64,
    f32: f64,
    bf16: Option<f64>,
    /// `None` if it was too slow to be measured.
    fp16: Option<f64>,
}

/// The speedup of products from which a dtype is worth using, as in `src/precision/choice.rs`.
const WORTH: f64 = 1.5;

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
    Some(sentences(&speeds?))
}

fn speed(line: &str) -> Option<MatmulSpeed> {
    let mut words = line.split(' ');
    let size = words.next()?.parse().ok()?;
    let f32 = words.next()?.parse().ok()?;
    let [bf16, fp16] = [words.next()?, words.next()?].map(|word| word.parse().ok());
    Some(MatmulSpeed { size, f32, bf16, fp16 })
}

/// One sentence for each dtype, for example "bf16: 4.3x as fast as f32 at 1024, 1.1x at 64: use it for layers wider
/// than about 128."
fn sentences(speeds: &[MatmulSpeed]) -> String {
    let names = ["bf16", "fp16"];
    let sentences = names.into_iter().enumerate().filter_map(|(i, name)| {
        let ratio = |speed: &MatmulSpeed| {
            let half = [speed.bf16, speed.fp16][i];
            Some((speed.size, half? / speed.f32))
        };
        let ratios: Vec<_> = speeds.iter().filter_map(ratio).collect();
        (!ratios.is_empty()).then(|| sentence(name, &ratios))
    });
    sentences.collect::<Vec<_>>().join("\n")
}

fn sentence(name: &str, ratios: &[(i64, f64)]) -> String {
    let (small, large) = (ratios[0], ratios[ratios.len() - 1]);
    let speeds = if ratios.len() == 1 {
        format!("{name}: {} as fast as f32 at {}", times(large.1), large.0)
    } else {
        let (large_ratio, small_ratio) = (times(large.1), times(small.1));
        format!("{name}: {large_ratio} as fast as f32 at {}, {small_ratio} at {}", large.0, small.0)
    };
    match ratios.iter().rposition(|(_, ratio)| *ratio < WORTH) {
        None => format!("{speeds}: use it for layers of every width."),
        Some(last) if last == ratios.len() - 1 => {
            format!("{speeds}: do not use it here for its speed.")
        }
        Some(last) => format!("{speeds}: use it for layers wider than about {}.", ratios[last].0),
    }
}

fn times(ratio: f64) -> String {
    if ratio >= 0.095 { format!("{ratio:.1}x") } else { format!("{ratio:.2}x") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_of_the_program_are_read() {
        let line = speed("256 100.5 430.25 -").unwrap();
        let read = MatmulSpeed { size: 256, f32: 100.5, bf16: Some(430.25), fp16: None };
        assert_eq!(line, read);
        assert_eq!(speed("256 100.5"), None);
        assert_eq!(speed("256 x 1 1"), None);
    }

    fn speeds(bf16: [f64; 3]) -> Vec<MatmulSpeed> {
        let sizes = [64, 256, 1024].into_iter().zip(bf16);
        sizes
            .map(|(size, bf16)| MatmulSpeed { size, f32: 100.0, bf16: Some(bf16), fp16: None })
            .collect()
    }

    #[test]
    fn the_advice_says_from_which_width_on_a_dtype_pays() {
        assert_eq!(
            sentences(&speeds([110.0, 300.0, 430.0])),
            "bf16: 4.3x as fast as f32 at 1024, 1.1x at 64: use it for layers wider than about 64."
        );
        assert_eq!(
            sentences(&speeds([200.0, 300.0, 430.0])),
            "bf16: 4.3x as fast as f32 at 1024, 2.0x at 64: use it for layers of every width."
        );
        let noise = sentences(&speeds([200.0, 110.0, 430.0]));
        assert!(noise.ends_with("use it for layers wider than about 256."), "{noise}");
        let mut slow = speeds([50.0, 40.0, 4.0]);
        slow[0].fp16 = Some(5.0);
        slow[1].fp16 = Some(5.0);
        assert_eq!(
            sentences(&slow),
            "bf16: 0.04x as fast as f32 at 1024, 0.5x at 64: do not use it here for its speed.\n\
             fp16: 0.05x as fast as f32 at 256, 0.05x at 64: do not use it here for its speed."
        );
    }
}
