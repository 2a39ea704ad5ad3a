//! Names and texts from a file are shown in messages such that they command no terminal and flood no log.

use std::collections::BTreeMap;
use std::fmt::Debug;

use serde_json::{Value as Json, json};
use tch::nn::{Init, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::checkpoint::Checkpoint;
use tch_amp::optim::{Optimizer, Sgd};
use tch_amp::{Error, GradScaler};

use testkit::files::Folder;
use testkit::handmade::{archive, manifest, metadata, safetensors, text};

/// Clears the screen, sets a title, turns the direction of the text, begins lines, and is as long as a book.
fn evil() -> String {
    format!("\u{1b}[2J\u{1b}]0;title\u{7}\u{202e}\r\n\u{9b}31m{}", "x".repeat(2_000_000))
}

/// Fails unless a text can be printed.
fn assert_harmless(what: &str, text: &str) {
    let harmful = |char: char| char.is_control() || ('\u{202a}'..='\u{202e}').contains(&char);
    let start: String = text.chars().take(300).flat_map(char::escape_default).collect();
    assert!(!text.contains(harmful), "{what}: {start}");
    assert!(text.len() < 4000, "{what}: {} bytes: {start}", text.len());
}

/// Fails unless a result is an error whose message, in both forms, can be printed and says what is expected.
fn assert_refused<T: Debug>(what: &str, result: Result<T, Error>, expected: &str) {
    let error = match result {
        Ok(_) => panic!("{what}: not refused"),
        Err(error) => error,
    };
    assert_harmless(what, &error.to_string());
    assert_harmless(what, &format!("{error:?}"));
    assert!(error.to_string().contains(expected), "{what}: {error}");
}

/// Loads a safetensors file with this header and `data` bytes after it.
fn with_header(header: &str, data: usize) -> Result<Checkpoint, Error> {
    Checkpoint::from_bytes(safetensors(header, data))
}

/// Loads a safetensors file with these tensors of one float each.
fn with_tensors(names: &[&str]) -> Result<Checkpoint, Error> {
    let mut header = serde_json::Map::new();
    for (index, name) in names.iter().enumerate() {
        let offsets = [4 * index, 4 * index + 4];
        let info = json!({ "dtype": "F32", "shape": [1], "data_offsets": offsets });
        header.insert((*name).to_owned(), info);
    }
    with_header(&Json::Object(header).to_string(), 4 * names.len())
}

/// Loads a file of PyTorch with these records.
fn with_records(records: &[(&str, &[u8])]) -> Result<Checkpoint, Error> {
    Checkpoint::from_bytes(archive(records))
}

fn with_pickle(parts: &[&[u8]]) -> Result<Checkpoint, Error> {
    with_records(&[("a/data.pkl", &[b"\x80\x02", &parts.concat()[..], b"."].concat())])
}

#[test]
fn names_in_damaged_files_are_shown_harmlessly() {
    let evil = evil();
    let quoted = json!(evil).to_string();
    let info = |dtype: &str| format!(r#"{{"dtype":{dtype},"shape":[1],"data_offsets":[0,4]}}"#);
    let twice = format!("{{{quoted}:{0},{quoted}:{0}}}", info(r#""F32""#));
    assert_refused("twice", with_header(&twice, 4), "occurs twice");
    let moved = format!("{{{quoted}:{}}}", info(r#""F64""#));
    assert_refused("offsets", with_header(&moved, 4), "the offsets of");
    let unknown = format!(r#"{{"a":{}}}"#, info(&quoted));
    let unknown = with_header(&unknown, 4).unwrap();
    assert_harmless("a file with an unknown dtype", &format!("{unknown:?}"));
    assert_refused("an unknown dtype", unknown.tensor("model.a"), "has no dtype");
    let ours = |parts: &str, tensor: &str| {
        let (tensors, entry) = match tensor {
            "" => (0, String::new()),
            name => (1, format!(",{name}:{}", info(r#""F32""#))),
        };
        let metadata = metadata(&manifest(parts, tensors));
        with_header(&format!("{{{metadata}{entry}}}"), 4 * tensors)
    };
    for (what, parts) in [
        ("an unknown kind", format!(r#"{{"a":{{"kind":{quoted}}}}}"#)),
        ("a kind that is no text", format!(r#"{{"a":{{"kind":[{quoted}]}}}}"#)),
        ("a group", format!(r#"{{"a":{{"kind":"optimizer","param_groups":{quoted}}}}}"#)),
        (
            "an algorithm",
            format!(
                r#"{{"a":{{"kind":"optimizer","param_groups":[{{"params":[],"lr":1,"algorithm":{quoted}}}]}}}}"#
            ),
        ),
    ] {
        assert_refused(what, ours(&parts, ""), "");
    }
    assert_refused("no part", ours("{}", &quoted), "");
}

/// A tensor whose checksum does not match is named, in both formats.
#[test]
fn names_with_wrong_checksums_are_shown_harmlessly() {
    let evil = evil();
    let (_folder, path) = Folder::with("x.safetensors");
    let mut checkpoint = Checkpoint::new();
    checkpoint.add_tensor(&evil, &Tensor::from_slice(&[1.5f64])).unwrap();
    checkpoint.save(&path).unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    assert_refused("safetensors", Checkpoint::from_bytes(bytes), "the checksum of");
}

#[test]
fn names_in_files_of_pytorch_are_shown_harmlessly() {
    let evil = evil();
    let short = &evil[..1000];
    let pickle: &[u8] = b"\x80\x02}.";
    for (what, name) in [
        ("a folder", format!("{short}/data.pkl")),
        ("no folder", short.to_owned()),
        ("a folder above", format!("a/../{short}")),
    ] {
        assert_refused(what, with_records(&[("a/data.pkl", pickle), (&name, b"x")]), "the record");
    }
    let order = format!("{}x", &evil[..14]);
    let records = [("a/data.pkl", pickle), ("a/byteorder", order.as_bytes())];
    assert_refused("the order of bytes", with_records(&records), "says");
    let long = text(&evil);
    assert_refused("a key twice", with_pickle(&[b"}", &long, b"Ns", &long, b"Ns"]), "twice");
    let class = [b"c", &evil.as_bytes()[30..], b"\n\x1b[2J\n"].concat();
    assert_refused("a class", with_pickle(&[&class]), "a class with a long name");
    // What this crate has recorded of the parts.
    let recorded = |kind: &str, value: &[u8]| {
        let parts = [b"}".as_slice(), &text("parts"), b"}", &long, &text(kind), b"sss"].concat();
        let parts = [&text("tch_amp")[..], &parts].concat();
        with_pickle(&[b"}", &long, value, b"s", &parts])
    };
    assert_refused("a wrong kind", recorded("model", b"N"), "is not one");
    assert_refused("an unknown kind", recorded(&evil, b"N"), "is not one");
    // A part of a Python program that is not supported: its reason is shown when it is asked for.
    let group = [b"}".as_slice(), &text("params"), b"]s", &text("lr"), &text(&evil), b"s"].concat();
    let group = [&group[..], &text("amsgrad"), b"Ns"].concat();
    let optimizer = [b"}".as_slice(), &text("state"), b"}s", &text("param_groups"), b"]"].concat();
    let optimizer = [&optimizer[..], &group, b"as"].concat();
    let checkpoint = with_pickle(&[b"}", &text("opt"), &optimizer, b"s"]).unwrap();
    assert_refused("an unsupported part", checkpoint.tensor("opt"), "unsupported");
}

#[test]
fn names_of_parts_and_tensors_are_shown_harmlessly() {
    let evil = evil();
    let mut checkpoint = Checkpoint::new();
    checkpoint.add_tensor(&evil, &Tensor::from(1f32)).unwrap();
    checkpoint.add_value("value", &evil).unwrap();
    let again = checkpoint.add_value(&evil, &1);
    assert_refused("a name that is taken", again, "there is a part");
    assert_refused("no part", checkpoint.tensor("nothing"), "it has");
    assert_refused("another part", checkpoint.value::<f64>(&evil), "is a tensor");
    assert_refused("a name that is asked for", checkpoint.tensor(&format!("a{evil}")), "has no");
    assert_refused("a value", checkpoint.value::<f64>("value"), "invalid type");
    assert_refused("a choice", checkpoint.value::<Choice>("value"), "unknown variant");
    assert_refused(
        "a scale",
        {
            let mut scaler = GradScaler::new(Device::Cpu).unwrap();
            checkpoint.restore().add(&evil, &mut scaler).apply()
        },
        "is a tensor",
    );
    assert_harmless("a checkpoint", &format!("{checkpoint:?}"));
    let vs = VarStore::new(Device::Cpu);
    assert_harmless("a restore", &format!("{:?}", checkpoint.restore().add("m", &vs)));

    let file = with_tensors(&[&evil, &format!("b{evil}"), "c"]).unwrap();
    assert_harmless("a file", &format!("{file:?}"));
    assert_refused("names", file.restore().add("model", &vs).apply(), "unexpected: ");
    let renamed = file.restore().add("model", &vs).rename_prefix("b", "");
    assert_refused("two names", renamed.apply(), "would both be");
    let _other = vs.root().var(&evil, &[2], Init::Const(0.0));
    let loose = file.restore().add("model", &vs).strict(false);
    assert_refused("a shape", loose.apply(), "has the shape");
    let loose = file.restore().add("model", &vs).strict(false).skip(&["*x"]).apply();
    assert_harmless("what was left out", &format!("{:?}", loose.unwrap()));
    let loose = file.restore().add("model", &vs).strict(false).rename_prefix("b", "");
    assert_refused("a renamed shape", loose.apply(), "would both be");
}

#[derive(Debug, serde::Deserialize)]
enum Choice {
    One,
}

#[test]
fn names_of_parameters_are_shown_harmlessly() {
    let evil = evil();
    let vs = VarStore::new(Device::Cpu);
    let _w = vs.root().var("w", &[2], Init::Const(0.0));
    let mut opt = Sgd { momentum: 0.5, ..Default::default() }.build(&vs, 0.1).unwrap();
    let with_state = |opt: &mut Optimizer, parameter: &str, key: &str| {
        let mut state = opt.state_dict().unwrap();
        let zeros = Tensor::zeros([2], (Kind::Float, Device::Cpu));
        state.state.insert(parameter.to_owned(), BTreeMap::from([(key.to_owned(), zeros)]));
        state
    };
    let unknown = with_state(&mut opt, &evil, "momentum_buffer");
    assert_refused("a parameter", opt.load_state_dict(&unknown), "is not a parameter");
    let key = with_state(&mut opt, "w", &evil);
    assert_refused("a key", opt.load_state_dict(&key), "does not keep");
    let mut listed = with_state(&mut opt, "w", "momentum_buffer");
    listed.param_groups[0].params.push(evil.clone());
    assert_refused("a listed parameter", opt.load_state_dict(&listed), "is not a parameter");
    listed.param_groups[0].params = vec![evil.clone(), evil];
    assert_refused("a parameter twice", opt.load_state_dict(&listed), "");
}

/// The numbers of parameters in many groups are a long text, too.
#[test]
fn groups_without_names_are_shown_harmlessly() {
    let set_to = |value: &[u8], name: &str| [&text(name), value].concat();
    let numbers = ["lr", "momentum", "dampening", "weight_decay"];
    let numbers = numbers.map(|name| set_to(b"G\0\0\0\0\0\0\0\0", name)).concat();
    let flags = ["nesterov", "maximize"].map(|name| set_to(b"\x89", name)).concat();
    let group = [b"}(".as_slice(), &text("params"), b"]K\x00a", &numbers, &flags, b"uq\x00"];
    let groups = [b"](".as_slice(), &group.concat(), &b"h\x00".repeat(20_000), b"e"].concat();
    let optimizer = [b"}".as_slice(), &text("state"), b"}s", &text("param_groups")].concat();
    let checkpoint = with_pickle(&[b"}", &text("opt"), &optimizer, &groups, b"ss"]).unwrap();
    let vs = VarStore::new(Device::Cpu);
    let _w = vs.root().var("w", &[2], Init::Const(0.0));
    let mut opt = Sgd::default().build(&vs, 0.1).unwrap();
    let refused = checkpoint.restore().add("opt", &mut opt).apply();
    assert_refused("groups", refused, "build it with the same groups");
}
