//! The table on the terminal, and the report.

use super::Run;
use super::measure::{self, SCALES};
use super::options::Options;
use super::ring::{MODES, RADIUS};
use crate::precision_name;
use crate::report::{document, or_dash};
use crate::{computer, print};
use anyhow::Result;
use run_report::{Document, Plot, Series, Spacing, Table};
use tch::{Device, Kind};
use tch_amp::Amp;

/// How many points of the generator are drawn.
const DRAWN: i64 = 400;

/// How far from the centre points are drawn, in each direction.
const SHOWN: f64 = 3.0;

/// Prints the table, and writes the report.
pub fn write(options: &Options, run: &Run, device: Device) -> Result<()> {
    print(table(options, run));
    crate::report::write(&options.common, 1, || page(options, run, device))
}

/// The result in numbers.
pub fn table(options: &Options, run: &Run) -> Table<7> {
    let last = |column| run.log.last(column);
    let loss = |column| or_dash(last(column).map(|loss| format!("{loss:.4}")));
    let mut table = Table::new([
        "run",
        "modes covered",
        "close points",
        "discriminator",
        "verdict",
        "moments",
        "skipped steps",
    ]);
    table.rows.push([
        precision_name(options.common.amp).to_owned(),
        or_dash(last(measure::COVERED).map(|modes| format!("{modes} of {MODES}"))),
        or_dash(last(measure::CLOSE).map(|share| format!("{:.0} %", 100.0 * share))),
        loss(measure::DISCRIMINATOR),
        loss(measure::VERDICT),
        loss(measure::DISTANCE),
        run.skipped.to_string(),
    ]);
    table
}

/// The report.
pub fn page(options: &Options, run: &Run, device: Device) -> Document {
    let (steps, amp) = (options.common.steps, options.common.amp);
    let covered = run.log.last(measure::COVERED).unwrap_or(0.0);
    let page = document("A generator and a discriminator")
        .result(&format!(
            "After {steps} steps in {}, the generator covers {covered} of {MODES} modes.",
            precision_name(amp)
        ))
        .table(&table(options, run))
        .note(
            "A mode is covered if at least half of its share of the points is near. Close points: within three standard \
             deviations of a mode. The losses are those of the last step; their balance matters, not their size.",
        )
        .heading("What the generator makes")
        .plot(&points(run))
        .heading("Losses")
        .plot(&plot(run, "loss", Spacing::Linear, &LOSSES))
        .heading("Modes")
        .plot(&plot(run, "modes covered", Spacing::Linear, &[("first", "modes", measure::COVERED)]));
    let page = match amp {
        Amp::Fp16 => page.heading("A scale for each loss").plot(&plot(
            run,
            "loss scale",
            Spacing::Log2,
            &OF_SCALES,
        )),
        Amp::Off | Amp::Bf16 | Amp::Auto => page,
    };
    page.heading("The run").facts([
        ("Steps", format!("{steps} of both networks, seed {}", options.common.seed)),
        ("Device", computer::device(device)),
    ])
}

/// The class, the label and the column of each line.
type Line = (&'static str, &'static str, &'static str);

const LOSSES: [Line; 3] = [
    ("first", "discriminator", measure::DISCRIMINATOR),
    ("second", "generator, verdict", measure::VERDICT),
    ("third", "generator, moments", measure::DISTANCE),
];
const OF_SCALES: [Line; 3] = [
    ("first", "discriminator", SCALES[0]),
    ("second", "generator, verdict", SCALES[1]),
    ("third", "generator, moments", SCALES[2]),
];

fn plot(run: &Run, label: &'static str, spacing: Spacing, lines: &[Line]) -> Plot {
    let series =
        lines.iter().map(|(class, name, column)| Series::line(class, name, run.log.series(column)));
    Plot::new(label, ["step", label], spacing, series.collect())
}

/// Points of the generator on the ring.
fn points(run: &Run) -> Plot {
    let angle = |i: i32| f64::from(i) * std::f64::consts::TAU / 128.0;
    let ring = (0..=128).map(|i| (RADIUS * angle(i).cos(), RADIUS * angle(i).sin())).collect();
    let drawn = run.points.narrow(0, 0, DRAWN.min(run.points.size()[0])).to_device(Device::Cpu);
    let numbers = Vec::<f64>::try_from(drawn.to_kind(Kind::Double).view(-1)).unwrap_or_default();
    let (points, _) = numbers.as_chunks::<2>();
    let points = points.iter().filter(|point| point.iter().all(|x| x.abs() <= SHOWN));
    let marks = points.map(|[x, y]| (*x, *y, format!("{x:.2}, {y:.2}"))).collect();
    let series = Series { marks, ..Series::line("second", "ring of the modes", ring) };
    // The ring would fill the plot otherwise, whose axes span the line alone.
    Plot::new("Points of the generator", ["x", "y"], Spacing::Linear, vec![series])
        .ranges([-SHOWN, SHOWN], [-SHOWN, SHOWN])
        .mark_name("a point of the generator")
}
