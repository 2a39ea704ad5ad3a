//! Small values are restored from both formats, including the floats that JSON lacks.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};
use tch_amp::checkpoint::Checkpoint;

use crate::checkpoint::unsaveable;
use testkit::files::Folder;

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

/// A value that either format could not load again is refused when it is added, and so whatever is added can be saved.
#[test]
fn what_is_added_can_be_saved_in_both_formats() {
    let folder = Folder::new();
    let nested = |levels: usize| (1..levels).fold(json!([]), |inner, _| json!([inner]));
    let maps = |levels: usize| (0..levels).fold(json!(1), |inner, _| json!({ "a": inner }));
    let text = |len: usize, text: &str| json!(text.repeat(len / text.len()));
    let row = json!([1.5, null, { "a": "\u{1}" }]);
    let cases: Vec<(&str, Json, Option<bool>)> = vec![
        ("many", json!(vec![true; 1_400_000]), Some(true)),
        ("too many", json!(vec![true; 2_100_000]), Some(false)),
        ("near the limit", json!(vec![0.5; 1_900_000]), None),
        ("rows", json!(vec![row.clone(); 200_000]), Some(true)),
        ("too many rows", json!(vec![row; 400_000]), Some(false)),
        ("deep", nested(60), Some(true)),
        ("deep maps", maps(60), Some(true)),
        ("too deep", nested(64), Some(false)),
        ("far too deep", maps(130), Some(false)),
        ("long", text(20_000_000, "x"), Some(true)),
        ("too long", text(40_000_000, "x"), Some(false)),
        ("quotes", text(14_000_000, "\""), None),
        ("backslashes", text(20_000_000, "\\"), None),
        ("control characters", text(5_000_000, "\u{1}"), None),
        ("too many control characters", text(8_000_000, "\u{1}"), Some(false)),
        (
            "long keys",
            json!({ "x".repeat(20_000_000): { "y".repeat(20_000_000): 1 } }),
            Some(false),
        ),
    ];
    for (what, value, is_fine) in cases {
        let mut checkpoint = Checkpoint::new();
        let added = checkpoint.add_value("value", &value);
        assert_eq!(is_fine.unwrap_or(added.is_ok()), added.is_ok(), "{what}: {added:?}");
        if added.is_ok() {
            for name in ["x.safetensors", "x.pt"] {
                let path = folder.file(name);
                checkpoint.save(&path).unwrap_or_else(|error| panic!("{what}: {name}: {error}"));
                let loaded = Checkpoint::load(&path).unwrap().value::<Json>("value").unwrap();
                assert!(loaded == value, "{what}: {name}");
            }
            continue;
        }
        let error = unsaveable(added);
        let advice = ["save long values as tensors", "nested deeper than 60 levels"];
        assert!(advice.iter().any(|advice| error.contains(advice)), "{what}: {error}");
        assert!(!checkpoint.contains("value"), "{what}");
    }
}

/// The limits hold for all parts together, for those of a state, and for those that were in a file.
#[test]
fn parts_that_fit_one_by_one_are_refused_together() {
    let many = vec![1.5; 800_000];
    let folder = Folder::new();
    let mut checkpoint = Checkpoint::new();
    checkpoint.add_value("a", &many).unwrap();
    let refused = |checkpoint: &mut Checkpoint| {
        assert!(checkpoint.add_value("b", &many).is_err());
        checkpoint.add_value("c", &vec![f64::INFINITY; 1000]).unwrap();
    };
    checkpoint.save(folder.file("x.pt")).unwrap();
    refused(&mut checkpoint);
    let mut loaded = Checkpoint::load(folder.file("x.pt")).unwrap();
    refused(&mut loaded);
    for checkpoint in [checkpoint, loaded] {
        for name in ["y.safetensors", "y.pt"] {
            checkpoint.save(folder.file(name)).unwrap();
        }
    }
}
