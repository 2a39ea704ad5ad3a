//! The meaning of measured speeds, in words. Only numbers go in, so that `cargo xtask doctor`, which does not link
//! libtorch, says the same.

/// The speed of square matrix products of one size, in GFLOP/s.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct MatmulSpeed {
    /// The number of rows and of columns.
    pub size: i64,
    /// In f32.
    pub f32: f64,
    /// In f32 where libtorch may use TensorFloat-32; `None` on the CPU. The same as `f32` on GPUs without it.
    pub tf32: Option<f64>,
    /// In bf16.
    pub bf16: Option<f64>,
    /// In fp16; `None` if it was too slow to be measured.
    pub fp16: Option<f64>,
}

impl MatmulSpeed {
    /// Makes a speed from its numbers, in GFLOP/s.
    pub fn new(
        size: i64,
        f32: f64,
        tf32: Option<f64>,
        bf16: Option<f64>,
        fp16: Option<f64>,
    ) -> Self {
        Self { size, f32, tf32, bf16, fp16 }
    }
}

/// The speedup of products from which a dtype is worth using: matrix products are a part of an iteration, and casts
/// cost time.
pub(crate) const WORTH: f64 = 1.5;

/// One sentence for each dtype, for example "bf16: 4.3x as fast as f32 at 1024, 1.1x at 64: use it for layers wider
/// than about 128."
pub fn advice(speeds: &[MatmulSpeed]) -> String {
    let names = ["tf32", "bf16", "fp16"];
    let sentences = names.into_iter().enumerate().filter_map(|(i, name)| {
        let of = |speed: &MatmulSpeed| [speed.tf32, speed.bf16, speed.fp16][i];
        let ratio = |speed: &MatmulSpeed| Some((speed.size, of(speed)? / speed.f32));
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

/// Says how to pad a layer whose matrix product tensor cores compute less efficiently; `None` if both of its sizes are
/// multiples of 8. From NVIDIA's "Matrix Multiplication Background User's Guide": before cuBLAS 11, tensor cores need
/// such sizes in half precision, and since then they are most efficient with them.
pub(crate) fn advice_for_layer(inputs: i64, outputs: i64) -> Option<String> {
    let padded = |size: i64| (size + 7) / 8 * 8;
    let (ins, outs) = (padded(inputs), padded(outputs));
    if (ins, outs) == (inputs, outputs) {
        return None;
    }
    Some(format!(
        "a layer from {inputs} to {outputs} has a size that is not a multiple of 8, which makes the tensor cores of \
         GPUs slower in half precision: pad it to {ins} and {outs}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn speeds(bf16: [f64; 3]) -> Vec<MatmulSpeed> {
        let sizes = [64, 256, 1024].into_iter().zip(bf16);
        sizes.map(|(size, bf16)| MatmulSpeed::new(size, 100.0, None, Some(bf16), None)).collect()
    }

    #[test]
    fn the_advice_says_from_which_width_on_a_dtype_pays() {
        assert_eq!(
            advice(&speeds([110.0, 300.0, 430.0])),
            "bf16: 4.3x as fast as f32 at 1024, 1.1x at 64: use it for layers wider than about 64."
        );
        assert_eq!(
            advice(&speeds([200.0, 300.0, 430.0])),
            "bf16: 4.3x as fast as f32 at 1024, 2.0x at 64: use it for layers of every width."
        );
        let noise = advice(&speeds([200.0, 110.0, 430.0]));
        assert!(noise.ends_with("use it for layers wider than about 256."), "{noise}");
        let mut slow = speeds([50.0, 40.0, 4.0]);
        slow[0].fp16 = Some(5.0);
        slow[1].fp16 = Some(5.0);
        assert_eq!(
            advice(&slow),
            "bf16: 0.04x as fast as f32 at 1024, 0.5x at 64: do not use it here for its speed.\n\
             fp16: 0.05x as fast as f32 at 256, 0.05x at 64: do not use it here for its speed."
        );
    }

    #[test]
    fn sizes_for_tensor_cores_are_multiples_of_eight() {
        assert_eq!(advice_for_layer(64, 8), None);
        assert_eq!(advice_for_layer(768, 3072), None);
        let advice = advice_for_layer(768, 50257).unwrap_or_default();
        assert!(advice.ends_with("pad it to 768 and 50264"), "{advice}");
        let advice = advice_for_layer(64, 10).unwrap_or_default();
        assert!(advice.ends_with("pad it to 64 and 16"), "{advice}");
    }
}
