//! The numbers of a run: in memory for the report and the checkpoints, in a CSV file, and in files of TensorBoard.

use super::events::Events;
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use tch::Tensor;
use tch_amp::checkpoint::{Checkpoint, Prepared, SaveState, SavedState, Stateful};

/// The file in the folder of the logs.
pub const CSV: &str = "log.csv";

/// The numbers of a step, in the order of the columns; `None` for what was not measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// The number of the step, from 1 on.
    pub step: u64,
    /// A number for each column.
    pub values: Vec<Option<f64>>,
}

/// The part of a checkpoint with the rows.
const PART: &str = "log";

/// Adds the rows to a checkpoint.
pub fn save(rows: &[Row], checkpoint: &mut Checkpoint) -> Result<()> {
    let cells = || rows.iter().flat_map(|row| &row.values);
    let mut table = Table {
        steps: rows.iter().map(|row| row.step as i64).collect(),
        numbers: cells().map(|cell| cell.unwrap_or(f64::NAN)).collect(),
        measured: cells().map(Option::is_some).collect(),
    };
    Ok(checkpoint.add(PART, &mut table)?)
}

/// Returns the rows of a checkpoint.
pub fn load(checkpoint: &Checkpoint) -> Result<Vec<Row>> {
    // Checkpoints of earlier versions have a record for each row.
    if let Ok(rows) = checkpoint.value(PART) {
        return Ok(rows);
    }
    let mut table = Table::default();
    checkpoint.restore().add(PART, &mut table).apply()?;
    table.rows()
}

/// The rows as tensors: a checkpoint holds far more elements of tensors than single values.
#[derive(Debug, Default)]
struct Table {
    steps: Vec<i64>,
    /// All rows, one after the other.
    numbers: Vec<f64>,
    /// Whether each number was measured: one that was can be NaN.
    measured: Vec<bool>,
}

impl Table {
    fn rows(&self) -> Result<Vec<Row>> {
        let columns = self.numbers.len().checked_div(self.steps.len()).unwrap_or(0);
        ensure!(
            self.numbers.len() == columns * self.steps.len()
                && self.numbers.len() == self.measured.len(),
            "the log in the checkpoint is damaged"
        );
        let cells = self.numbers.iter().zip(&self.measured);
        let mut cells = cells.map(|(number, is_measured)| is_measured.then_some(*number));
        let row = |step: &i64| {
            let step = u64::try_from(*step).context("the log in the checkpoint is damaged")?;
            Ok(Row { step, values: cells.by_ref().take(columns).collect() })
        };
        self.steps.iter().map(row).collect()
    }
}

impl Stateful for Table {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> tch_amp::Result<()> {
        state.tensor("steps", &Tensor::from_slice(&self.steps))?;
        state.tensor("numbers", &Tensor::from_slice(&self.numbers))?;
        state.tensor("measured", &Tensor::from_slice(&self.measured))
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> tch_amp::Result<Prepared<'a>> {
        let loaded = Self {
            steps: Vec::try_from(&saved.tensor("steps")?)?,
            numbers: Vec::try_from(&saved.tensor("numbers")?)?,
            measured: Vec::try_from(&saved.tensor("measured")?)?,
        };
        Ok(Prepared::new(move || *self = loaded))
    }
}

/// A table of numbers that grows by a row at a time. With a folder, each row is in the files when the call returns.
#[derive(Debug)]
pub struct Log {
    columns: Vec<String>,
    rows: Vec<Row>,
    files: Option<(File, Events)>,
}

impl Log {
    /// Begins a log with these columns, such as `loss` or `eval/loss`, which are also the names in TensorBoard.
    ///
    /// `earlier` are the rows that a checkpoint had, of a run that goes on after step `done`: the CSV file then has
    /// these and no others. Without a folder, the rows are in memory only.
    pub fn start(
        folder: Option<&Path>,
        columns: &[&str],
        earlier: Vec<Row>,
        done: u64,
    ) -> Result<Self> {
        ensure!(
            earlier.iter().all(|row| row.values.len() == columns.len()),
            "the checkpoint is of a run that logged other numbers"
        );
        let columns: Vec<String> = columns.iter().map(|&column| column.to_owned()).collect();
        let mut log = Self { columns, rows: earlier, files: None };
        if let Some(folder) = folder {
            // Events first: it makes the folder.
            let events = Events::create(folder, done + 1)?;
            log.files = Some((log.csv(&folder.join(CSV))?, events));
        }
        Ok(log)
    }

    /// Adds a row with the numbers that were measured.
    pub fn write(&mut self, step: u64, measured: &[(&str, f64)]) -> Result<()> {
        let mut values = vec![None; self.columns.len()];
        for (name, value) in measured {
            let column = self.columns.iter().position(|column| column == name);
            values[column.with_context(|| format!("the log has no column {name}"))?] = Some(*value);
        }
        let row = Row { step, values };
        if let Some((csv, events)) = &mut self.files {
            csv.write_all(line(&row).as_bytes()).context("cannot write to the log")?;
            events.scalars(step, measured)?;
        }
        self.rows.push(row);
        Ok(())
    }

    /// All rows, for a checkpoint.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// The steps and the numbers of a column, where it has any, for a plot.
    pub fn series(&self, column: &str) -> Vec<(f64, f64)> {
        let Some(index) = self.columns.iter().position(|name| name == column) else {
            return Vec::new();
        };
        let point = |row: &Row| row.values[index].map(|value| (row.step as f64, value));
        self.rows.iter().filter_map(point).collect()
    }

    /// The last number of a column.
    pub fn last(&self, column: &str) -> Option<f64> {
        self.series(column).last().map(|point| point.1)
    }

    /// The median of a column, which a busy machine changes less than the mean.
    pub fn median(&self, column: &str) -> Option<f64> {
        let mut numbers: Vec<f64> = self.series(column).iter().map(|point| point.1).collect();
        numbers.sort_by(f64::total_cmp);
        numbers.get(numbers.len() / 2).copied()
    }

    /// Writes the rows so far to a new file, which then takes the place of an older one.
    fn csv(&self, path: &Path) -> Result<File> {
        let mut text = format!("step,{}\n", self.columns.join(","));
        text.extend(self.rows.iter().map(line));
        let new = PathBuf::from(format!("{}.new", path.display()));
        let write = || {
            let mut file = File::create(&new)?;
            file.write_all(text.as_bytes())?;
            fs::rename(&new, path)?;
            std::io::Result::Ok(file)
        };
        write().with_context(|| format!("cannot write {}", path.display()))
    }
}

/// A line of the CSV file. A number is written such that reading it gives the same number.
fn line(row: &Row) -> String {
    let cell = |value: &Option<f64>| value.map_or_else(String::new, |value| value.to_string());
    let cells: Vec<String> = row.values.iter().map(cell).collect();
    format!("{},{}\n", row.step, cells.join(","))
}
