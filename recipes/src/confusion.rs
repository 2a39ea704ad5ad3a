//! How well classes are told apart.

use anyhow::Result;
use tch::Tensor;
use tch_amp::insight::html::Table;

/// How often each class has got which answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Confusion {
    /// A row for each class, with a number for each answer.
    pub counts: Vec<Vec<usize>>,
    /// The mean loss.
    pub loss: f64,
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

    /// Has no answers.
    pub fn none(classes: usize) -> Self {
        Self { counts: vec![vec![0; classes]; classes], loss: f64::NAN }
    }

    /// The share of right answers.
    pub fn accuracy(&self) -> f64 {
        let right: usize = (0..self.counts.len()).map(|class| self.counts[class][class]).sum();
        share(right, self.counts.iter().flatten().sum())
    }

    /// Precision, recall, F1 score and the size of a class. Each is 0 where it is not defined.
    pub fn scores(&self, class: usize) -> ([f64; 3], usize) {
        let support = self.counts[class].iter().sum();
        let answered: usize = self.counts.iter().map(|row| row[class]).sum();
        let right = self.counts[class][class];
        (
            [share(right, answered), share(right, support), share(2 * right, answered + support)],
            support,
        )
    }

    /// A row for each class with its scores, and their mean. `things` are what was classified.
    pub fn scores_table(&self, labels: &[String], things: &str) -> Table<5> {
        let mut table = Table::new(["class", "precision", "recall", "F1", things]);
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
