//! A bad batch after the training: its step is skipped, a tracer says why, and the training goes on.

use super::data::Text;
use super::model::{Gpt, VOCABULARY};
use super::train::{ROWS, SIZE};
use anyhow::Result;
use serde::{Deserialize, Serialize};
use tch::nn::{ModuleT, VarStore};
use tch::{Kind, Tensor};
use tch_amp::insight::{Explanation, Tracer, named};
use tch_amp::optim::Optimizer;
use tch_amp::{Autocast, GradScaler};

/// What happened.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Incident {
    /// Why the step was skipped; `None` if it was not.
    pub explanation: Option<Explanation>,
    /// Whether the weights are those of before.
    pub unchanged: bool,
    /// The loss of the next batch.
    pub next_loss: f64,
}

/// What a step needs.
pub struct Training<'a> {
    pub vs: &'a VarStore,
    pub model: &'a Gpt,
    pub optimizer: &'a mut Optimizer,
    pub scaler: &'a mut GradScaler,
    pub region: Autocast,
}

impl Training<'_> {
    /// A step whose loss is the mean over the rows, each of which is the mean over its counted bytes.
    fn step(&mut self, text: &Text, counted: &Tensor) -> Result<(f64, Option<Explanation>)> {
        let (tokens, targets) = text.batch(ROWS, SIZE.length, self.vs.device());
        let (model, region) = (self.model, self.region);
        let loss = || {
            region.run(|| {
                let logits = model.forward_t(&tokens, true).to_kind(Kind::Float);
                named("mean of each row", || {
                    let of_bytes = logits.view([-1, VOCABULARY]).log_softmax(-1, Kind::Float);
                    let of_targets = -of_bytes.gather(1, &targets.reshape([-1, 1]), false);
                    let sums =
                        (of_targets.view([ROWS, -1]) * counted).sum_dim_intlist(1, false, None);
                    (sums / counted.sum_dim_intlist(1, false, None)).mean(Kind::Float)
                })
            })
        };
        let mut tracer = Tracer::new(self.vs)?;
        tracer.begin(self.scaler)?;
        self.optimizer.zero_grad()?;
        let value = loss()?;
        self.scaler.backward(&value)?;
        let skipped = self.scaler.step(self.optimizer)?.is_skipped()?;
        self.scaler.update()?;
        let explanation = if skipped { tracer.explain(self.scaler, loss)? } else { None };
        Ok((value.double_value(&[]), explanation))
    }

    /// Takes a step with a batch in which a row is nothing but padding, and a step with a good one.
    pub fn incident(mut self, text: &Text) -> Result<Incident> {
        let counted = Tensor::ones([ROWS, SIZE.length], (Kind::Float, self.vs.device()));
        let padded = counted.copy();
        let _zeros = padded.get(0).zero_();
        let weights =
            |vs: &VarStore| vs.trainable_variables().iter().map(Tensor::copy).collect::<Vec<_>>();
        let before = weights(self.vs);
        let (_, explanation) = self.step(text, &padded)?;
        let unchanged = before == weights(self.vs);
        let (next_loss, _) = self.step(text, &counted)?;
        Ok(Incident { explanation, unchanged, next_loss })
    }
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
