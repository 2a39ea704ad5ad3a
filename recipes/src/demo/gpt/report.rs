//! The model's part of the report, in text and in HTML.

use super::Comparison;
use super::train::{LENGTH, ROWS, Run};
use crate::demo::speed;
use crate::precision_name;
use crate::report::mebibytes;
use run_report::{Column, Document, Plot, Series, Spacing, Table};

/// The steps over which a loss is averaged.
const LAST: usize = 20;

/// One sentence on what bf16 gains, about the steps that both runs took.
pub fn verdict(gpt: &Comparison) -> String {
    let Comparison { fp32, bf16, .. } = gpt;
    let common = gpt.common_steps();
    let percent = (bf16.loss(LAST, common) / fp32.loss(LAST, common) - 1.0).abs() * 100.0;
    // To tenths, and not to none: the losses are equal by chance alone.
    let within = (percent * 10.0).ceil().max(1.0) / 10.0;
    let memory = gpt.memory_share().map_or_else(String::new, |share| {
        format!(" and needs {share:.0} % of the memory for activations")
    });
    let speed = speed::in_words(speed::speedup(&bf16.seconds, &fp32.seconds));
    if gpt.is_slow {
        return format!(
            "bf16 is {speed}{memory}; it took {}, over which the loss is the same within {within:.1} %.",
            gpt.steps_taken()
        );
    }
    let plan = bf16.plan.as_ref().map(|plan| format!(" The plan: {plan}.")).unwrap_or_default();
    let gain = if bf16.is_planned_f32 {
        "no dtype is faster than fp32 here, so the plan keeps the whole model in it".to_owned()
    } else {
        format!("bf16 is {speed}{memory}")
    };
    format!("{gain}; the loss is the same within {within:.1} %.{plan}")
}

/// The table: bytes per second, milliseconds per step, steps, the loss of the steps that both took, and memory.
pub fn table(gpt: &Comparison) -> Table<6> {
    let common = gpt.common_steps();
    let loss = match gpt.is_cut_short() {
        true => format!("loss of the first {common} steps"),
        false => "final loss".to_owned(),
    };
    let mut table = Table::new(
        ["run", "tokens/s", "ms per step", "steps", &loss, "activations"].map(Column::new),
    );
    for run in [&gpt.fp32, &gpt.bf16] {
        let rate = run.tokens_per_second();
        table.rows.push([
            precision_name(run.precision).to_owned(),
            format!("{rate:.0}"),
            format!("{:.0}", 1e3 * (ROWS * LENGTH) as f64 / rate),
            run.losses.len().to_string(),
            format!("{:.3}", run.loss(LAST, common)),
            mebibytes(run.activations),
        ]);
    }
    table
}

/// Adds the section of the page.
pub fn section(page: Document, gpt: &Comparison) -> Document {
    let Comparison { fp32, bf16, .. } = gpt;
    let (origin, sample) = match bf16.sample.is_empty() {
        true => (&fp32.origin, &fp32.sample),
        false => (&bf16.origin, &bf16.sample),
    };
    let mut page = page.heading("A small GPT").paragraph(&format!(
        "A transformer with three million parameters learns to continue Rust code, byte by byte, from {origin}: in fp32 \
         and under bf16 autocast, from the same weights and with the same batches."
    ));
    if gpt.is_slow {
        page = page.paragraph(&why_slow(gpt));
    }
    let page = page
        .table(&table(gpt))
        .note(&format!(
            "{} Tokens are bytes. Activations: what a step holds beside the weights, gradients and optimizer state, \
             measured in a process of its own for each run; - if it is unknown.",
            which_loss(gpt)
        ))
        .plot_of_precisions(&loss_plot(gpt))
        .note("Faint lines: every step. Strong lines: exponential moving average.")
        .paragraph("What the model writes after this short training:")
        .preformatted(sample);
    match &bf16.incident {
        None => page,
        Some(incident) => page.paragraph(BAD_BATCH).preformatted(&incident.to_string()),
    }
}

/// Why bf16 gains no time.
fn why_slow(gpt: &Comparison) -> String {
    format!(
        "Training in bf16 gains no time because products in bf16 are slow here, as on devices without instructions for \
         them. Amp::advice timed products before the training: {}. So bf16 took {}. Where products are faster in bf16 \
         than in f32, training is faster as well.",
        gpt.advice,
        gpt.steps_taken()
    )
}

/// What the losses in the table are.
fn which_loss(gpt: &Comparison) -> String {
    let all = gpt.fp32.losses.len();
    match gpt.is_cut_short() {
        true => format!(
            "Loss: mean of the steps that both runs took, in nats per byte; fp32 went on to {:.3} in {all} steps.",
            gpt.fp32.loss(LAST, all)
        ),
        false => format!("Final loss: mean of the last {LAST} steps, in nats per byte."),
    }
}

/// The share of fp32's memory, in per cent, below which bf16 gains some.
const LESS_MEMORY: f64 = 95.0;

/// What bf16 and a plan gain although bf16 is slow, each with its name.
pub fn gains(gpt: &Comparison) -> Vec<(&'static str, String)> {
    let memory = gpt.memory_share().filter(|&share| share < LESS_MEMORY).map(|share| {
        let of = |run: &Run| mebibytes(run.activations);
        let text = format!(
            "in bf16 the activations of the GPT take {} in place of {}, {share:.0} %: what does not fit in fp32 may fit",
            of(&gpt.bf16),
            of(&gpt.fp32)
        );
        ("Memory", text)
    });
    let plan = gpt.bf16.plan.as_ref().map(|plan| {
        let text = format!(
            "measured for the GPT, {plan}. A program that asks for bf16 can follow this plan instead"
        );
        ("A plan", text)
    });
    memory.into_iter().chain(plan).collect()
}

/// What comes before the text of an incident.
pub const BAD_BATCH: &str = "Then a row of a batch is nothing but padding, and the mean over its bytes divides zero by \
                             zero. The step is skipped, and a tracer runs it again to say why:";

/// The loss of every step and its moving average, with one series for each run.
pub fn loss_plot(gpt: &Comparison) -> Plot {
    let series = |run: &Run| {
        let points = (0..).zip(&run.losses).map(|(index, &loss)| (f64::from(index), loss));
        let name = precision_name(run.precision);
        Series::smoothed(name, name, points.collect(), 0.8)
    };
    Plot::new(
        "Training loss per step of the GPT in both precisions",
        ["step", "loss (nats per byte)"],
        Spacing::Linear,
        [&gpt.fp32, &gpt.bf16].map(series).into(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch_amp::Amp;

    fn run(precision: Amp, seconds: [f64; 5]) -> Run {
        Run {
            precision,
            plan: None,
            is_planned_f32: false,
            losses: vec![2.0; 4],
            seconds: seconds.to_vec(),
            activations: Some(100),
            sample: String::new(),
            origin: String::new(),
            incident: None,
        }
    }

    fn compared(fp32: Run, bf16: Run) -> Comparison {
        Comparison { advice: "advice".to_owned(), is_slow: false, fp32, bf16 }
    }

    #[test]
    fn only_times_that_do_not_overlap_are_a_gain() {
        let fp32 = run(Amp::Off, [2.0, 2.0, 2.1, 2.2, 9.0]);
        let fast = run(Amp::Bf16, [1.0, 1.0, 1.05, 1.1, 8.0]);
        let said = verdict(&compared(fp32.clone(), fast));
        assert!(said.starts_with("bf16 is 2.0x faster than fp32 here and needs 100 %"), "{said}");
        let noisy = run(Amp::Bf16, [0.5, 0.6, 1.0, 2.0, 9.0]);
        let said = verdict(&compared(fp32, noisy));
        assert!(said.starts_with("bf16 is not measurably faster or slower"), "{said}");
    }

    #[test]
    fn a_plan_in_f32_is_no_gain_of_bf16() {
        let fp32 = run(Amp::Off, [2.0; 5]);
        let planned = Run {
            plan: Some("everything is in f32".to_owned()),
            is_planned_f32: true,
            ..run(Amp::Bf16, [1.0; 5])
        };
        let said = verdict(&compared(fp32, planned));
        assert!(said.starts_with("no dtype is faster than fp32 here, so the plan keeps"), "{said}");
        assert!(!said.contains("bf16"), "{said}");
    }
}
