//! The report of the demo: one self-contained HTML file.

use super::computer::Facts;
use super::table::{table, verdict};
use super::train::{GROWTH_INTERVAL, RunResult};
use crate::demo::gpt::{self, Comparison};
use crate::precision_name;
use crate::report::document;
use run_report::{Document, Plot, Series, Spacing};
use tch_amp::Amp;

const SMOOTHING: f64 = 0.9;

const INTRODUCTION: &str = "\
A small convolutional network is trained three times with tch-amp, from the same initial weights and with the same \
batches: in fp32, under bf16 autocast, and under fp16 autocast with a gradient scaler.";

const TABLE_NOTE: &str = "\
Final loss: mean of the last epoch. Test accuracy: 360 held-out images, so one image is 0.28 points. Time per step: \
median; on most CPUs fp16 is slow, and bf16 is the better choice. Peak memory: of the whole process, libtorch \
included, or of the tensors on a GPU; - if it is unknown.";

const FOOTER: &str = r#"<footer>Data: <em>Optical Recognition of Handwritten Digits</em>, E. Alpaydin and C. Kaynak,
1998, UCI Machine Learning Repository, <a href="https://doi.org/10.24432/C50P49">DOI 10.24432/C50P49</a>,
CC BY 4.0.</footer>"#;

/// The whole page, with the runs of the GPT first, if there are any, and what half precision gains where it is slow.
pub fn page(results: &[RunResult], facts: &Facts, gpt: Option<&Comparison>) -> Document {
    let mut page = document("Mixed precision on this computer");
    if let Some(gpt) = gpt {
        page = page.result(&gpt::report::verdict(gpt));
        let gains = gains(results, gpt);
        if !gains.is_empty() {
            page = page.heading("What there is to gain here").facts(gains);
        }
        page = gpt::report::section(page, gpt);
    }
    let steps = results.iter().map(|run| run.steps.len()).max().unwrap_or(0);
    page.heading("Handwritten digits in three precisions")
        .paragraph(INTRODUCTION)
        .paragraph(&verdict(results))
        .table(&table(results))
        .note(TABLE_NOTE)
        .subheading("Training loss")
        .plot_of_precisions(&loss_plot(results))
        .note("Faint lines: every step. Strong lines: exponential moving average.")
        .subheading("Loss scale of the fp16 run")
        .plot(&scale_plot(results))
        .note(&format!(
            "The largest fp16 number is 65504. The scaler multiplies the loss so that small gradients do not become \
             zero. It doubles the scale after {GROWTH_INTERVAL} steps in a row without overflow. When gradients \
             overflow, it skips the step and halves the scale. The default interval, as in PyTorch, is 2000 steps; \
             this run has {steps}, so it uses {GROWTH_INTERVAL} to show growth and overflow."
        ))
        .heading("The run")
        .facts(run(facts, steps, gpt.is_some()))
        .html(FOOTER)
}

/// What half precision gains on a device where it is slow, each gain with its name; none where the speed is the gain.
pub fn gains(results: &[RunResult], gpt: &Comparison) -> Vec<(&'static str, String)> {
    if !gpt.is_slow {
        return Vec::new();
    }
    let mut gains = gpt::report::gains(gpt);
    let of = |amp: Amp| results.iter().find(|run| run.precision == amp);
    if let (Some(fp32), Some(fp16)) = (of(Amp::Off), of(Amp::Fp16)) {
        let text = format!(
            "training in fp16 with a loss scale works here, too: the network of the digits skipped {} of {} steps \
             because of overflows, and classifies {:.2} % of the held-out images correctly ({:.2} % in fp32). So a \
             program for a GPU can be tried on this computer",
            fp16.skipped(),
            fp16.steps.len(),
            fp16.accuracy,
            fp32.accuracy
        );
        gains.push(("fp16", text));
    }
    gains
}

fn run(facts: &Facts, steps: usize, has_gpt: bool) -> [(&'static str, String); 4] {
    let of_gpt = if has_gpt { "; all of them for the GPT" } else { "" };
    let (threads, epochs) = (facts.threads, facts.epochs);
    [
        ("Device", facts.device.clone()),
        (
            "CPU threads",
            format!(
                "{threads} for the digits, so that results do not depend on the number of cores{of_gpt}"
            ),
        ),
        ("Seed", facts.seed.to_string()),
        (
            "Digits",
            format!(
                "{epochs} epochs, {steps} steps per run, 1,437 images of 8 x 8 pixels, batches of 64, AdamW"
            ),
        ),
    ]
}

/// The loss of every step and its moving average, with one series for each run.
pub fn loss_plot(results: &[RunResult]) -> Plot {
    let series = |run: &RunResult| {
        let points = (0..).zip(&run.steps).map(|(index, step)| (f64::from(index), step.loss));
        let name = precision_name(run.precision);
        Series::smoothed(name, name, points.collect(), SMOOTHING)
    };
    Plot::new(
        "Training loss per step of the three runs",
        ["step", "loss (cross-entropy, nats)"],
        Spacing::Log10,
        results.iter().map(series).collect(),
    )
}

/// The scale over time, with one series for each run that has a scaler. Crosses mark the skipped steps.
pub fn scale_plot(results: &[RunResult]) -> Plot {
    Plot::new(
        "Loss scale per step of the fp16 run",
        ["step", "loss scale"],
        Spacing::Log2,
        results.iter().filter_map(scale_series).collect(),
    )
    .mark_name("step skipped: the gradients overflowed at this scale")
}

fn scale_series(run: &RunResult) -> Option<Series> {
    run.final_scale?;
    let (mut curve, mut marks) = (Vec::new(), Vec::new());
    for (index, step) in run.steps.iter().enumerate() {
        let (start, scale) = (index as f64, step.scale?);
        curve.extend([(start, scale), (start + 1.0, scale)]);
        if step.skipped {
            marks.push((start + 1.0, scale, format!("step {index} skipped at scale {scale}")));
        }
    }
    let name = precision_name(run.precision);
    Some(Series { marks, ..Series::line(name, name, curve) })
}

#[cfg(test)]
mod tests {
    use super::super::train::Step;
    use super::*;
    use crate::PRECISIONS;
    use crate::demo::gpt::train::Run;

    /// Runs of the digits, of which that in fp16 skipped the second of two steps.
    fn digits() -> Vec<RunResult> {
        let run = |precision: Amp| {
            let is_scaled = precision == Amp::Fp16;
            let scale = is_scaled.then_some(65536.0);
            let step = |skipped| Step { loss: 0.5, scale, skipped, seconds: 0.002 };
            RunResult {
                precision,
                steps: vec![step(false), step(is_scaled)],
                final_loss: 0.5,
                accuracy: 98.0,
                peak_memory: None,
                final_scale: is_scaled.then_some(32768.0),
            }
        };
        PRECISIONS.map(run).into()
    }

    /// A run of the GPT whose loss falls from 6 by 0.1 in each step, down to 2.5.
    fn gpt_run(precision: Amp, steps: usize, seconds: f64, activations: u64) -> Run {
        Run {
            precision,
            plan: None,
            is_planned_f32: false,
            losses: (0..steps).map(|step| (6.0 - 0.1 * step as f64).max(2.5)).collect(),
            seconds: vec![seconds; steps],
            activations: Some(activations << 20),
            sample: String::new(),
            origin: "a text".to_owned(),
            incident: None,
        }
    }

    fn html(gpt: &Comparison) -> String {
        let device = "CPU".to_owned();
        let facts = Facts { device, threads: 1, seed: 0, epochs: 1 };
        page(&digits(), &facts, Some(gpt)).to_html()
    }

    fn slow(steps: usize, activations: u64) -> Comparison {
        let plan = Some("everything is in f32: each operator is faster there".to_owned());
        Comparison {
            advice: "train in f32 on Cpu: bf16 products are only 0.05 times as fast as f32 here"
                .into(),
            is_slow: true,
            fp32: gpt_run(Amp::Off, steps, 0.1, 120),
            bf16: Run { plan, ..gpt_run(Amp::Bf16, steps.min(5), 2.0, activations) },
        }
    }

    #[test]
    fn a_machine_with_slow_bf16_shows_what_else_there_is_to_gain() {
        let html = html(&slow(200, 70));
        for said in [
            "bf16 is 20.0x slower than fp32 here and needs 58 % of the memory for activations; it took only 5 of the \
             200 steps, over which the loss is the same within 0.1 %.",
            "because products in bf16 are slow here",
            "So bf16 took only 5 of the 200 steps.",
            "bf16 products are only 0.05 times as fast as f32 here",
            "loss of the first 5 steps",
            "fp32 went on to 2.500 in 200 steps",
            "the activations of the GPT take 70 MiB in place of 120 MiB, 58 %",
            "measured for the GPT, everything is in f32: each operator is faster there.",
            "A program that asks for bf16 can follow this plan instead",
            "skipped 1 of 2 steps because of overflows",
        ] {
            assert!(html.contains(said), "{said}");
        }
        // What was compared stands in both rows, and nothing else.
        assert_eq!(html.matches("<td>5.800</td>").count(), 2, "{html}");
        assert!(!html.contains("<td>2.500</td>") && !html.contains("final loss</th><th>act"));
    }

    #[test]
    fn a_short_demo_with_slow_bf16_says_that_it_took_all_steps() {
        let comparison = slow(4, 118);
        let html = html(&comparison);
        for said in [
            "it took all 4 steps, over which the loss is the same",
            "So bf16 took all 4 steps.",
            "because products in bf16 are slow here",
            "<th>final loss</th>",
        ] {
            assert!(html.contains(said), "{said}");
        }
        assert!(!html.contains("only 4"), "{html}");
        let gains: Vec<_> =
            gains(&digits(), &comparison).into_iter().map(|(name, _)| name).collect();
        assert_eq!(gains, ["A plan", "fp16"], "98 % of the memory is no gain");
    }

    #[test]
    fn a_machine_with_fast_bf16_shows_its_speed_and_all_steps() {
        let plan = Some("bf16: an iteration is 2.00 times as fast as in f32".to_owned());
        let comparison = Comparison {
            advice: "train in bf16 on Cpu: bf16 products are 3.1 times as fast as f32 here".into(),
            is_slow: false,
            fp32: gpt_run(Amp::Off, 200, 0.1, 120),
            bf16: Run { plan, ..gpt_run(Amp::Bf16, 200, 0.05, 70) },
        };
        let html = html(&comparison);
        let verdict = "bf16 is 2.0x faster than fp32 here and needs 58 % of the memory for activations; the loss is \
                       the same within 0.1 %. The plan: bf16: an iteration is 2.00 times as fast as in f32.";
        assert!(html.contains(verdict), "{html}");
        assert_eq!(html.matches("<td>2.500</td>").count(), 2);
        assert!(html.contains("<th>final loss</th>") && html.contains("mean of the last 20 steps"));
        assert!(!html.contains("What there is to gain here") && !html.contains("are slow here"));
        assert!(gains(&digits(), &comparison).is_empty());
    }
}
