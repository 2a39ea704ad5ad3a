//! The results as a table and as one sentence.

use super::train::RunResult;
use crate::demo::speed;
use crate::precision_name;
use crate::report::{mebibytes, or_dash};
use run_report::Table;
use tch_amp::Amp;

const HEADER: [&str; 7] = [
    "run",
    "final loss",
    "test accuracy",
    "ms per step",
    "peak memory",
    "skipped steps",
    "final scale",
];

/// One row for each run, with `-` where a value does not apply.
pub fn table(results: &[RunResult]) -> Table<{ HEADER.len() }> {
    let mut table = Table::new(HEADER);
    results.iter().for_each(|run| table.rows.push(row(run)));
    table
}

fn row(run: &RunResult) -> [String; HEADER.len()] {
    [
        precision_name(run.precision).to_owned(),
        format!("{:.4}", run.final_loss),
        format!("{:.2} %", run.accuracy),
        format!("{:.2}", run.step_ms()),
        mebibytes(run.peak_memory),
        or_dash(run.final_scale.map(|_| run.skipped())),
        or_dash(run.final_scale),
    ]
}

/// One sentence that compares the measurements of the runs with those of fp32.
pub fn verdict(results: &[RunResult]) -> String {
    let (base, others): (Vec<_>, Vec<_>) =
        results.iter().partition(|run| run.precision == Amp::Off);
    let [base] = base[..] else {
        return String::new();
    };
    let mut sentence = format!(
        "On the held-out digits {}; per step {}",
        compare(&others, |run| accuracy(run, base)),
        compare(&others, |run| speed::in_words(speedup(run, base))),
    );
    if others.iter().all(|run| speedup(run, base) <= 1.0) {
        sentence += ": this network is small; autocast pays off with bigger layers, \
                     on hardware that is fast in half precision";
    }
    sentence + "."
}

/// `bf16 is … and fp16 is …`, or `bf16 and fp16 are …` where the same holds for all.
fn compare(runs: &[&RunResult], predicate: impl Fn(&RunResult) -> String) -> String {
    let same = runs.windows(2).all(|pair| predicate(pair[0]) == predicate(pair[1]));
    if let [first, _, ..] = runs
        && same
    {
        let names: Vec<&str> = runs.iter().map(|run| precision_name(run.precision)).collect();
        return format!("{} are {}", names.join(" and "), predicate(first));
    }
    let clause =
        |run: &&RunResult| format!("{} is {}", precision_name(run.precision), predicate(run));
    runs.iter().map(clause).collect::<Vec<_>>().join(" and ")
}

fn accuracy(run: &RunResult, base: &RunResult) -> String {
    let points = run.accuracy - base.accuracy;
    match format!("{:.1}", points.abs()).as_str() {
        "0.0" => "as accurate as fp32".to_owned(),
        size if points > 0.0 => format!("{size} points above fp32"),
        size => format!("{size} points below fp32"),
    }
}

fn speedup(run: &RunResult, base: &RunResult) -> f64 {
    speed::speedup(&run.seconds(), &base.seconds())
}

#[cfg(test)]
mod tests {
    use super::super::train::Step;
    use super::*;

    fn result(precision: Amp, accuracy: f64, seconds: f64) -> RunResult {
        let step = Step { loss: 0.5, scale: None, skipped: false, seconds };
        RunResult {
            precision,
            steps: vec![step],
            final_loss: 0.5,
            accuracy,
            peak_memory: None,
            final_scale: None,
        }
    }

    #[test]
    fn the_sentence_says_which_run_is_faster_and_by_how_much() {
        let runs = [
            result(Amp::Off, 98.0, 0.002),
            result(Amp::Bf16, 98.5, 0.001),
            result(Amp::Fp16, 98.0, 0.006),
        ];
        assert_eq!(
            verdict(&runs),
            "On the held-out digits bf16 is 0.5 points above fp32 and fp16 is as accurate as fp32; \
             per step bf16 is 2.0x faster than fp32 here and fp16 is 3.0x slower than fp32 here."
        );
    }

    #[test]
    fn the_sentence_names_the_small_network_when_autocast_gains_nothing() {
        let runs = [
            result(Amp::Off, 98.0, 0.002),
            result(Amp::Bf16, 97.5, 0.002),
            result(Amp::Fp16, 98.0, 0.002),
        ];
        let sentence = verdict(&runs);
        assert!(sentence.contains("bf16 is 0.5 points below fp32"), "{sentence}");
        assert!(
            sentence.contains("bf16 and fp16 are not measurably faster or slower than fp32"),
            "{sentence}"
        );
        assert!(sentence.contains("bigger layers"), "{sentence}");
    }

    #[test]
    fn runs_whose_step_times_overlap_are_not_ranked() {
        let mut runs = [Amp::Off, Amp::Bf16].map(|p| result(p, 98.0, 0.0));
        for (run, millis) in runs.iter_mut().zip([[2.0, 4.0, 5.0, 9.0], [1.0, 2.0, 3.0, 8.0]]) {
            let step = |ms: f64| Step { loss: 0.5, scale: None, skipped: false, seconds: ms / 1e3 };
            run.steps = millis.map(step).to_vec();
        }
        assert!(verdict(&runs).contains("bf16 is not measurably faster or slower than fp32"));
    }

    #[test]
    fn columns_line_up_and_unknown_cells_are_dashes() {
        let text = table(&[result(Amp::Off, 98.0, 0.002)]).to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        assert!(lines.iter().all(|line| line.len() == lines[0].len()), "{text}");
        let cells: Vec<&str> = lines[2].split_whitespace().collect();
        assert_eq!(cells, ["fp32", "0.5000", "98.00", "%", "2.00", "-", "-", "-"]);
    }
}
