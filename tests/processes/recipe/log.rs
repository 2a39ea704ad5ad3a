//! The files of a log.

use std::fs;

use serde_json::{Value, json};
use tch_amp::checkpoint::Checkpoint;

use recipes::log::{self, CSV, Log, Row};
use testkit::files::Folder;
use testkit::python::Oracle;

const COLUMNS: [&str; 3] = ["loss", "held_out", "scale"];

/// Logs three steps, of which the first one was logged before, when a run went on after it.
fn write(folder: &Folder) {
    let mut log = Log::start(Some(&folder.0), &COLUMNS, Vec::new(), 0).unwrap();
    log.write(1, &[("loss", 0.1), ("scale", 65536.0)]).unwrap();
    let saved = log.rows().to_vec();
    log.write(2, &[("loss", 99.0)]).unwrap();
    let mut log = Log::start(Some(&folder.0), &COLUMNS, saved, 1).unwrap();
    log.write(2, &[("held_out", 1.0 / 3.0), ("loss", -2e-30)]).unwrap();
    log.write(300, &[("loss", f64::NAN)]).unwrap();
    assert_eq!(log.series("scale"), [(1.0, 65536.0)]);
    assert_eq!(log.last("held_out"), Some(1.0 / 3.0));
    assert!(log.last("other").is_none());
}

#[test]
fn the_csv_file_has_the_rows_of_the_checkpoint_and_those_that_follow() {
    let folder = Folder::new();
    write(&folder);
    let text = fs::read_to_string(folder.file(CSV)).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "step,loss,held_out,scale");
    assert_eq!(lines[1], "1,0.1,,65536");
    let cells: Vec<&str> = lines[2].split(',').collect();
    let numbers: Vec<f64> = cells[1..3].iter().map(|cell| cell.parse().unwrap()).collect();
    assert_eq!((cells[0], numbers, cells[3]), ("2", vec![-2e-30, 1.0 / 3.0], ""));
    assert_eq!(lines[3..], ["300,NaN,,"]);
}

/// A checkpoint holds 2 million values, and the rows of a long run are far more.
#[test]
fn a_checkpoint_has_the_rows_of_a_long_run() {
    let folder = Folder::new();
    let mut rows: Vec<_> = (1..=250_000u64)
        .map(|step| Row { step, values: vec![Some(step as f64 / 3.0); 11] })
        .collect();
    // Not measured, which is not the same as not a number.
    rows[7].values = [vec![None; 10], vec![Some(f64::NAN)]].concat();
    rows[8].values = vec![Some(f64::INFINITY); 11];
    for name in ["x.safetensors", "x.pt"] {
        let mut checkpoint = Checkpoint::new();
        log::save(&rows, &mut checkpoint).unwrap();
        checkpoint.save(folder.file(name)).unwrap();
        let loaded = log::load(&Checkpoint::load(folder.file(name)).unwrap()).unwrap();
        assert_eq!(format!("{:?}", &loaded[..10]), format!("{:?}", &rows[..10]), "{name}");
        assert!(loaded[10..] == rows[10..], "{name}");
    }
    let mut checkpoint = Checkpoint::new();
    log::save(&[], &mut checkpoint).unwrap();
    assert!(log::load(&checkpoint).unwrap().is_empty());
}

#[test]
fn a_log_of_records_is_still_loaded() {
    let rows = vec![Row { step: 3, values: vec![Some(0.5), None, Some(f64::NEG_INFINITY)] }; 2];
    let mut checkpoint = Checkpoint::new();
    checkpoint.add_value("log", &rows).unwrap();
    assert_eq!(log::load(&checkpoint).unwrap(), rows);
}

#[test]
fn columns_that_do_not_exist_and_rows_of_another_log_are_refused() {
    let mut log = Log::start(None, &COLUMNS, Vec::new(), 0).unwrap();
    let error = log.write(1, &[("accuracy", 1.0)]).unwrap_err().to_string();
    assert!(error.contains("accuracy"), "{error}");
    log.write(1, &[("loss", 1.0)]).unwrap();
    let error = Log::start(None, &COLUMNS[..2], log.rows().to_vec(), 1).unwrap_err().to_string();
    assert!(error.contains("logged other numbers"), "{error}");
}

/// What TensorBoard reads, by the documentation of its files.
fn events(folder: &Folder) -> Option<Value> {
    let printed = Oracle::find("event_files.py")?.run(&[&folder.0.to_string_lossy()], "");
    // JSON has no NaN.
    Some(serde_json::from_str(&printed.replace("NaN", "\"NaN\"")).unwrap())
}

#[test]
fn event_files_have_the_scalars_and_where_a_run_goes_on() {
    let folder = Folder::new();
    write(&folder);
    let Some(read) = events(&folder) else { return };
    let f32 = |number: f64| f64::from(number as f32);
    let version = json!({ "step": 0, "version": "brain.Event:2" });
    let want = json!([
        [
            version,
            { "step": 1, "session": 1 },
            { "step": 1, "scalars": [["loss", f32(0.1)], ["scale", 65536.0]] },
            { "step": 2, "scalars": [["loss", 99.0]] },
        ],
        [
            version,
            { "step": 2, "session": 1 },
            { "step": 2, "scalars": [["held_out", f32(1.0 / 3.0)], ["loss", f32(-2e-30)]] },
            { "step": 300, "scalars": [["loss", "NaN"]] },
        ],
    ]);
    assert_eq!(read, want);
}

#[test]
fn the_reader_notices_a_damaged_event_file() {
    let folder = Folder::new();
    write(&folder);
    let Some(oracle) = Oracle::find("event_files.py") else { return };
    let mut files = fs::read_dir(&folder.0).unwrap().map(|entry| entry.unwrap().path());
    let path = files.find(|path| path.to_string_lossy().contains("tfevents")).unwrap();
    let mut bytes = fs::read(&path).unwrap();
    let place = bytes.len() / 2;
    bytes[place] ^= 1;
    fs::write(path, bytes).unwrap();
    let output = oracle.command().arg(&folder.0).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("a checksum is wrong"), "{said}");
}

#[test]
fn a_row_with_an_unknown_key_is_refused() {
    let read = |row: Value| serde_json::from_value::<Row>(row).map_err(|error| error.to_string());
    assert!(read(json!({"step": 3, "values": [0.5, null]})).is_ok());
    let error = read(json!({"step": 3, "values": [], "loss": 0.5})).unwrap_err();
    assert!(error.contains("unknown field `loss`, expected `step` or `values`"), "{error}");
}
