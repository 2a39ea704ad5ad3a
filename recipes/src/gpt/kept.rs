//! What the functions of `tch_amp::lean` save.

use super::model::{Config, Gpt};
use crate::memory::{check_fits, peak_of};
use anyhow::Result;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::Autocast;

/// By how many bytes an excerpt more in a batch raises the peak of a forward and a backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    pub lean: u64,
    /// With tch's operators in the place of `tch_amp::lean`.
    pub operators: u64,
    /// Of the logits, in the dtype of the region.
    pub logits: u64,
}

impl Kept {
    /// Measures new models of this size without dropout, if there is room for one.
    pub fn measure(config: Config, region: Autocast, device: Device) -> Result<Self> {
        // Weights, gradients and what a pass adds to them.
        check_fits(config.least_bytes(2), device)?;
        let Config { vocabulary, length, .. } = config;
        let tokens = |rows: i64| {
            let tokens = Tensor::arange(rows * length, (Kind::Int64, device));
            tokens.remainder(vocabulary).view([rows, length])
        };
        let more = |lean: bool| -> Result<u64> {
            let vs = VarStore::new(device);
            let model = Gpt::new(&vs.root(), Config { lean, ..config });
            let peak = |rows: i64| -> Result<u64> {
                let tokens = tokens(rows);
                let (done, bytes) = peak_of(device, || -> Result<()> {
                    region.try_run(|| model.loss(&tokens, &tokens, false))?.backward();
                    Ok(())
                })?;
                done?;
                Ok(bytes)
            };
            // The first pass makes the gradients.
            peak(1)?;
            let [one, two] = [peak(1)?, peak(2)?];
            Ok(two.saturating_sub(one))
        };
        let one = Tensor::ones([1, 1], (Kind::Float, device));
        let product = no_grad(|| region.run(|| one.matmul(&one)))?.kind();
        let logits = u64::try_from(vocabulary * length)? * product.elt_size_in_bytes() as u64;
        Ok(Self { lean: more(true)?, operators: more(false)?, logits })
    }

    /// A sentence that says what an excerpt takes, and how much of it the logits are.
    pub fn words(&self) -> String {
        let Self { lean, operators, logits } = *self;
        let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
        let share = 100.0 * logits as f64 / lean.max(1) as f64;
        let of_logits = if logits * 10 >= lean {
            format!(
                "the logits are {share:.0} % of the former, and the operators copy them several times"
            )
        } else {
            format!(
                "the logits are only {share:.1} % of the former, so that they make little difference"
            )
        };
        format!(
            "{} for each excerpt with tch_amp::lean, {} with tch's operators; {of_logits}",
            mib(lean),
            mib(operators)
        )
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    fn config(vocabulary: i64) -> Config {
        let (width, layers, heads, length) = (64, 2, 1, 64);
        let (dropout, recompute, lean) = (0.0, false, true);
        Config { vocabulary, width, layers, heads, length, dropout, recompute, lean }
    }

    /// With many words less than half is left, and it is said that the logits are why.
    #[test]
    fn the_logits_of_many_words_are_most_of_what_is_saved() {
        let region = Autocast::new(Device::Cpu).dtype(Kind::BFloat16);
        let many = Kept::measure(config(8192), region, Device::Cpu).unwrap();
        assert!(many.lean * 2 <= many.operators, "{many:?}");
        assert!(many.words().contains("several times"), "{}", many.words());
        let few = Kept::measure(config(64), region, Device::Cpu).unwrap();
        assert!(few.lean < few.operators, "{few:?}");
        assert!(few.words().contains("are only"), "{}", few.words());
    }

    /// The two models have the same numbers.
    #[test]
    fn both_models_have_the_same_loss() {
        tch::manual_seed(1);
        let vs = VarStore::new(Device::Cpu);
        let mut other = VarStore::new(Device::Cpu);
        let lean = Gpt::new(&vs.root(), config(300));
        let operators = Gpt::new(&other.root(), Config { lean: false, ..config(300) });
        other.copy(&vs).unwrap();
        let tokens = Tensor::arange(64, (Kind::Int64, Device::Cpu)).view([1, -1]);
        let region = Autocast::new(Device::Cpu).dtype(Kind::BFloat16);
        let loss = |model: &Gpt| region.try_run(|| model.loss(&tokens, &tokens, false)).unwrap();
        let [lean, operators] = [loss(&lean), loss(&operators)].map(|loss| loss.double_value(&[]));
        assert!((lean - operators).abs() < 1e-5 * operators, "{lean} and {operators}");
    }
}
