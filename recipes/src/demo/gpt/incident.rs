//! A bad batch after the training: its step is skipped, a tracer says why, and the training goes on.

use crate::gpt::data::Text;
use crate::gpt::train::Trainer;
use crate::gpt::vocabulary::BYTES;
use anyhow::Result;
use serde::{Deserialize, Serialize};
use tch::nn::{ModuleT, VarStore};
use tch::{Kind, Tensor};
use tch_amp::insight::{Explanation, Tracer, named};

/// What happened.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Incident {
    /// Why the step was skipped; `None` if it was not.
    pub explanation: Option<Explanation>,
    /// Whether the weights are those of before.
    pub unchanged: bool,
    /// The loss of the next batch.
    pub next_loss: f64,
}

/// Takes a step with a batch of `[rows, bytes]` in which a row is nothing but padding, and a step with a good one.
pub fn cause(trainer: &mut Trainer<'_>, text: &Text, size: [i64; 2]) -> Result<Incident> {
    let counted = Tensor::ones(size, (Kind::Float, trainer.device));
    let padded = counted.copy();
    let _zeros = padded.get(0).zero_();
    let weights =
        |vs: &VarStore| vs.trainable_variables().iter().map(Tensor::copy).collect::<Vec<_>>();
    let before = weights(&trainer.vs);
    let (_, explanation) = step(trainer, text, &padded)?;
    let unchanged = before == weights(&trainer.vs);
    let (next_loss, _) = step(trainer, text, &counted)?;
    Ok(Incident { explanation, unchanged, next_loss })
}

/// A step whose loss is the mean over the rows, each of which is the mean over its counted bytes.
fn step(
    trainer: &mut Trainer<'_>,
    text: &Text,
    counted: &Tensor,
) -> Result<(f64, Option<Explanation>)> {
    let (rows, length) = counted.size2()?;
    let (tokens, targets) = text.batch(rows, length, trainer.device);
    let Trainer { vs, model, region, optimizer, scaler, .. } = trainer;
    let loss = || {
        region.run(|| {
            let logits = model.forward_t(&tokens, true).to_kind(Kind::Float);
            named("mean of each row", || {
                let of_bytes = logits.view([-1, BYTES]).log_softmax(-1, Kind::Float);
                let of_targets = -of_bytes.gather(1, &targets.reshape([-1, 1]), false);
                let sums = (of_targets.view_as(counted) * counted).sum_dim_intlist(1, false, None);
                (sums / counted.sum_dim_intlist(1, false, None)).mean(Kind::Float)
            })
        })
    };
    let mut tracer = Tracer::new(&*vs)?;
    tracer.begin(scaler)?;
    optimizer.zero_grad()?;
    let value = loss()?;
    scaler.backward(&value)?;
    let skipped = scaler.step(optimizer)?.is_skipped()?;
    scaler.update()?;
    let explanation = if skipped { tracer.explain(scaler, loss)? } else { None };
    Ok((value.double_value(&[]), explanation))
}

impl std::fmt::Display for Incident {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.explanation {
            Some(explanation) => write!(f, "{explanation}")?,
            None => f.write_str("the step was taken")?,
        }
        let weights = if self.unchanged { "unchanged" } else { "changed" };
        write!(
            f,
            "\nThe weights are {weights}, and the loss of the next batch is {:.3}.",
            self.next_loss
        )
    }
}
