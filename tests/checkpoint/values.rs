//! Small values are restored from both formats, including the floats that JSON lacks.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};
use tch_amp::Error;
use tch_amp::checkpoint::Checkpoint;

use crate::common::files::Folder;

/// Values that a training program keeps: the best results so far, which start at infinity.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Progress {
    epoch: u64,
    best: f64,
    bests: HashMap<String, f64>,
    history: Vec<(u32, Option<f32>)>,
    schedule: Schedule,
    #[serde(flatten)]
    more: BTreeMap<String, Metric>,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
enum Schedule {
    Constant,
    Plateau { best: f64, patience: u32 },
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
enum Metric {
    Number(f64),
    Text(String),
}

fn progress() -> Progress {
    Progress {
        epoch: 0,
        best: f64::INFINITY,
        bests: HashMap::from([
            ("loss/val".to_owned(), f64::INFINITY),
            ("accuracy~".to_owned(), f64::NEG_INFINITY),
            ("inf".to_owned(), 0.5),
        ]),
        history: vec![(1, Some(f32::INFINITY)), (2, None), (3, Some(0.25))],
        schedule: Schedule::Plateau { best: f64::NEG_INFINITY, patience: 3 },
        more: BTreeMap::from([
            ("f1".to_owned(), Metric::Number(f64::NEG_INFINITY)),
            ("name".to_owned(), Metric::Text("inf".to_owned())),
        ]),
    }
}

#[test]
fn floats_that_json_lacks_are_restored() {
    let folder = Folder::new();
    for name in ["x.safetensors", "x.pt"] {
        let mut checkpoint = Checkpoint::new();
        checkpoint.add_value("best", &f64::INFINITY).unwrap();
        checkpoint.add_value("worst", &Some(f32::NEG_INFINITY)).unwrap();
        checkpoint.add_value("nan", &[f64::NAN, 1.0]).unwrap();
        checkpoint.add_value("none", &None::<f64>).unwrap();
        checkpoint.add_value("progress", &progress()).unwrap();
        checkpoint.add_value("plain", &Schedule::Constant).unwrap();
        // The same without a file.
        let from = |checkpoint: &Checkpoint| {
            assert_eq!(checkpoint.value::<f64>("best").unwrap(), f64::INFINITY, "{name}");
            assert_eq!(checkpoint.value::<f32>("worst").unwrap(), f32::NEG_INFINITY, "{name}");
            let nan = checkpoint.value::<Vec<f64>>("nan").unwrap();
            assert!(nan[0].is_nan() && nan[1] == 1.0, "{name}: {nan:?}");
            assert_eq!(checkpoint.value::<Option<f64>>("none").unwrap(), None, "{name}");
            assert_eq!(checkpoint.value::<Progress>("progress").unwrap(), progress(), "{name}");
            assert_eq!(checkpoint.value::<Schedule>("plain").unwrap(), Schedule::Constant);
            let wrong = checkpoint.value::<f64>("none").unwrap_err().to_string();
            assert_eq!(wrong, "the value `none` does not fit: invalid type: null, expected f64");
        };
        from(&checkpoint);
        checkpoint.save(folder.file(name)).unwrap();
        let loaded = Checkpoint::load(folder.file(name)).unwrap();
        from(&loaded);
        // And through the other format.
        for other in ["y.safetensors", "y.pt"] {
            loaded.save(folder.file(other)).unwrap();
            from(&Checkpoint::load(folder.file(other)).unwrap());
        }
    }
}

/// A value that neither format could load again is refused when it is saved.
#[test]
fn too_many_values_are_refused_by_both_formats() {
    let folder = Folder::new();
    let mut checkpoint = Checkpoint::new();
    checkpoint.add_value("many", &vec![true; 2_100_000]).unwrap();
    for name in ["x.safetensors", "x.pt"] {
        let refused = checkpoint.save(folder.file(name));
        match refused {
            Err(Error::Checkpoint(error)) => {
                assert!(error.to_string().contains("save long values as tensors"), "{error}");
            }
            other => panic!("{other:?}"),
        }
    }
}
