//! The numbers of a run: what is logged, and the evaluation on held-out sentences.

use super::train::{Measured, Trainer};
use crate::recipe::{Precision, Table};
use anyhow::Result;
use std::time::Instant;
use tch::{Tensor, no_grad};

/// The columns of the log, and the names in TensorBoard.
pub const COLUMNS: [&str; 7] =
    [LOSS, HELD_OUT, ACCURACY, LEARNING_RATE, GRADIENT_NORM, SCALE, RATE];
/// The loss of a step, before it was taken.
pub const LOSS: &str = "loss";
/// The loss on held-out sentences.
pub const HELD_OUT: &str = "held_out_loss";
/// The share of held-out sentences with the right answer.
pub const ACCURACY: &str = "accuracy";
/// The learning rate of the step.
pub const LEARNING_RATE: &str = "learning_rate";
/// The 2-norm of all gradients, before they were clipped.
pub const GRADIENT_NORM: &str = "gradient_norm";
/// The scale after the step, in fp16.
pub const SCALE: &str = "scale";
/// Of all ranks, since the previous line of the log.
pub const RATE: &str = "sentences_per_second";

/// How many held-out sentences of each class have got which answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Confusion {
    /// A row for each class, with a number for each answer.
    pub counts: Vec<Vec<usize>>,
    /// The mean loss.
    pub loss: f64,
}

impl Trainer<'_> {
    /// Returns the numbers of a step for the log. All ranks call this.
    pub fn read(
        &mut self,
        measured: &Measured,
        lr: f64,
        since: Instant,
    ) -> Result<Vec<(&'static str, f64)>> {
        let mut numbers = vec![(LOSS, self.ranks.mean(&measured.loss)?), (LEARNING_RATE, lr)];
        let norm = measured.norm.as_ref().map(|norm| (GRADIENT_NORM, norm.double_value(&[])));
        numbers.extend(norm);
        if self.options.common.amp == Precision::Fp16 {
            numbers.push((SCALE, self.scaler.get_scale()?));
        }
        let read = std::mem::take(&mut self.read) as f64;
        numbers.push((RATE, read / since.elapsed().as_secs_f64()));
        Ok(numbers)
    }

    /// Classifies all held-out sentences. Each rank takes a part, and all of them get all logits.
    pub fn evaluate(&self) -> Result<Confusion> {
        let (mut logits, mut labels) = (Vec::new(), Vec::new());
        for batch in self.held_out.in_order(self.options.rows) {
            let part = batch.map(|tensor| self.ranks.share(tensor)).to(self.device);
            let part = no_grad(|| self.region.run(|| self.model.logits(&part, false)))?;
            logits.push(self.ranks.gather(&part)?);
            labels.push(batch.labels);
        }
        // The last batch has some sentences twice.
        let count = self.held_out.len() as i64;
        let logits = Tensor::cat(&logits, 0).narrow(0, 0, count).to_device(tch::Device::Cpu);
        let labels = Tensor::cat(&labels, 0).narrow(0, 0, count);
        Confusion::new(&logits, &labels)
    }
}

impl Confusion {
    /// Compares logits with the right classes.
    pub fn new(logits: &Tensor, labels: &Tensor) -> Result<Self> {
        let loss = logits.cross_entropy_for_logits(labels).double_value(&[]);
        let classes = logits.size()[1] as usize;
        let answers = Vec::<i64>::try_from(logits.argmax(1, false))?;
        let mut counts = vec![vec![0; classes]; classes];
        for (label, answer) in Vec::<i64>::try_from(labels)?.into_iter().zip(answers) {
            counts[label as usize][answer as usize] += 1;
        }
        Ok(Self { counts, loss })
    }

    /// The share of right answers.
    pub fn accuracy(&self) -> f64 {
        let right: usize = (0..self.counts.len()).map(|class| self.counts[class][class]).sum();
        share(right, self.counts.iter().flatten().sum())
    }

    /// Precision, recall, F1 score and the number of sentences of a class. Each is 0 where it is not defined.
    pub fn scores(&self, class: usize) -> ([f64; 3], usize) {
        let support = self.counts[class].iter().sum();
        let answered: usize = self.counts.iter().map(|row| row[class]).sum();
        let right = self.counts[class][class];
        (
            [share(right, answered), share(right, support), share(2 * right, answered + support)],
            support,
        )
    }

    /// A row for each class with its scores, and their mean.
    pub fn scores_table(&self, labels: &[String]) -> Table {
        let mut table = Table::new(["class", "precision", "recall", "F1", "sentences"]);
        let mut row = |name: &str, scores: [f64; 3], support: usize| {
            let [p, r, f] = scores.map(|score| format!("{score:.3}"));
            table.row([name.to_owned(), p, r, f, support.to_string()]);
        };
        let (mut mean, mut all) = ([0.0; 3], 0);
        for (class, label) in labels.iter().enumerate() {
            let (scores, support) = self.scores(class);
            row(label, scores, support);
            mean = std::array::from_fn(|i| mean[i] + scores[i] / labels.len() as f64);
            all += support;
        }
        row("mean", mean, all);
        table
    }

    /// The confusion matrix: a line for each class, with the number of each answer.
    pub fn matrix(&self, labels: &[String]) -> String {
        let width = labels.iter().map(|label| label.chars().count()).max().unwrap_or(0).max(6);
        let line = |name: &str, cells: Vec<String>| {
            let cells: String = cells.iter().map(|cell| format!("  {cell:>width$}")).collect();
            format!("{name:<width$}{cells}\n")
        };
        let rows = labels
            .iter()
            .zip(&self.counts)
            .map(|(label, row)| line(label, row.iter().map(usize::to_string).collect()));
        line("", labels.to_vec()) + &rows.collect::<String>()
    }
}

fn share(part: usize, whole: usize) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// The numbers of a step that are shown with the progress.
pub fn words(numbers: &[(&str, f64)]) -> String {
    let find = |name| numbers.iter().find(|number| number.0 == name).map(|number| number.1);
    let mut words = format!("loss {:.3}", find(LOSS).unwrap_or(f64::NAN));
    if let (Some(loss), Some(accuracy)) = (find(HELD_OUT), find(ACCURACY)) {
        words += &format!(", held-out {loss:.3}, accuracy {:.1} %", 100.0 * accuracy);
    }
    if let Some(scale) = find(SCALE) {
        words += &format!(", scale {scale}");
    }
    words + &format!(", {:.0} sentences/s", find(RATE).unwrap_or(f64::NAN))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use tch::Kind;

    #[test]
    fn scores_are_those_of_the_counts() {
        let answers = Tensor::from_slice(&[0i64, 0, 0, 1, 1, 0]);
        let logits = answers.one_hot(3).to_kind(Kind::Float);
        let confusion =
            Confusion::new(&logits, &Tensor::from_slice(&[0i64, 0, 1, 1, 2, 0])).unwrap();
        assert_eq!(confusion.counts, [vec![3, 0, 0], vec![1, 1, 0], vec![0, 1, 0]]);
        assert_eq!(confusion.accuracy(), 4.0 / 6.0);
        assert_eq!(confusion.scores(0), ([0.75, 1.0, 6.0 / 7.0], 3));
        assert_eq!(confusion.scores(1), ([0.5, 0.5, 0.5], 2));
        assert_eq!(confusion.scores(2), ([0.0, 0.0, 0.0], 1));
        let right = -(f64::exp(1.0) / (f64::exp(1.0) + 2.0)).ln();
        // tch computes it in f32.
        assert!((confusion.loss - (right + 2.0 / 6.0)).abs() < 1e-6, "{}", confusion.loss);
    }
}
