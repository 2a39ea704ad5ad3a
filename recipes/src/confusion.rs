//! How well classes are told apart.

use anyhow::Result;
use run_report::Table;
use tch::Tensor;

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

    /// The averages of the scores in scikit-learn's `classification_report`: micro, of all answers together, where each
    /// of the scores is the accuracy; macro, the mean over the classes; and weighted, by the sizes of the classes.
    pub fn averages(&self) -> [(&'static str, [f64; 3]); 3] {
        let (classes, total) = (self.counts.len(), self.counts.iter().flatten().sum());
        let (mut macros, mut weighted) = ([0.0; 3], [0.0; 3]);
        for class in 0..classes {
            let (scores, support) = self.scores(class);
            for (i, score) in scores.into_iter().enumerate() {
                macros[i] += score / classes as f64;
                weighted[i] += score * share(support, total);
            }
        }
        let micro = [self.accuracy(); 3];
        [("micro average", micro), ("macro average", macros), ("weighted average", weighted)]
    }

    /// A row for each class with its scores, and their averages. `things` are what was classified.
    pub fn scores_table(&self, labels: &[String], things: &str) -> Table<5> {
        let mut table = Table::new(["class", "precision", "recall", "F1", things]);
        let mut row = |name: &str, scores: [f64; 3], support: usize| {
            let [p, r, f] = scores.map(|score| format!("{score:.3}"));
            table.rows.push([name.to_owned(), p, r, f, support.to_string()]);
        };
        for (class, label) in labels.iter().enumerate() {
            let (scores, support) = self.scores(class);
            row(label, scores, support);
        }
        for (name, scores) in self.averages() {
            row(name, scores, self.counts.iter().flatten().sum());
        }
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
    use crate::order::mixed;
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
    /// The definitions of scikit-learn, from the answers themselves: of a class, the right answers among its answers,
    /// those among its things, and the harmonic mean of both; 0 where a denominator is 0.
    #[test]
    fn averages_are_those_of_the_definitions() {
        let ratio = |a: f64, b: f64| if b == 0.0 { 0.0 } else { a / b };
        let scores = |right: f64, answered: f64, there: f64| {
            let (p, r) = (ratio(right, answered), ratio(right, there));
            [p, r, ratio(2.0 * p * r, p + r)]
        };
        for classes in 2..7_i64 {
            let class = |place: u64, seed| (mixed(place + seed) % (classes as u64 + 1)) as i64;
            // The last class is never answered, and another one rarely occurs.
            let things = 0..50 * classes as u64;
            let answers: Vec<i64> = things.clone().map(|i| class(i, 0).min(classes - 2)).collect();
            let labels: Vec<i64> = things.map(|i| class(i, 1 << 40).min(classes - 1)).collect();
            let count = |is: &dyn Fn(i64, i64) -> bool| {
                answers.iter().zip(&labels).filter(|(a, l)| is(**a, **l)).count() as f64
            };
            let all = labels.len() as f64;
            let (mut macros, mut weighted, mut sums) = ([0.0; 3], [0.0; 3], [0.0; 3]);
            for class in 0..classes {
                let right = count(&|a, l| a == class && l == class);
                let (answered, there) = (count(&|a, _| a == class), count(&|_, l| l == class));
                let of_class = scores(right, answered, there);
                for i in 0..3 {
                    macros[i] += of_class[i] / classes as f64;
                    weighted[i] += of_class[i] * there / all;
                    sums[i] += [right, answered, there][i];
                }
            }
            let micro = scores(sums[0], sums[1], sums[2]);

            let logits = Tensor::from_slice(&answers).one_hot(classes).to_kind(Kind::Float);
            let confusion = Confusion::new(&logits, &Tensor::from_slice(&labels)).unwrap();
            let found = confusion.averages().map(|average| average.1);
            for (found, want) in
                found.iter().flatten().zip([micro, macros, weighted].iter().flatten())
            {
                assert!((found - want).abs() < 1e-12, "{classes}: {found} and {want}");
            }
        }
    }
}
