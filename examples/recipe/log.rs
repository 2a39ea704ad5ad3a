//! The numbers of a run: in memory for the report and the checkpoints, in a CSV file, and in files of TensorBoard.

use super::events::Events;
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

/// The file in the folder of the logs.
pub const CSV: &str = "log.csv";

/// The numbers of a step, in the order of the columns; `None` for what was not measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The number of the step, from 1 on.
    pub step: u64,
    /// A number for each column.
    pub values: Vec<Option<f64>>,
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
