//! Tests of folders of safetensors shards, whose pieces of tensors are where their files say.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::replaced::listed;
use super::*;
use crate::distributed::{remove, remove_leftover};
use crate::error::Error;
use crate::writer::Writer;

const INDEX: &str = "model.safetensors.index.json";

/// A tensor of bytes in a file: its name, its offsets and its sizes.
type Part<'a> = (&'a str, &'a [i64], &'a [i64]);

/// Writes a file of these tensors, whose elements count from `first`, with this text as its sharding.
fn write(path: &Path, parts: &[Part<'_>], dtype: Dtype, sharding: Option<&str>) {
    let tensor = |&(name, _, sizes): &Part<'_>| {
        let len = sizes.iter().product::<i64>() as usize * dtype.size();
        let bytes: Vec<u8> = (0..len).map(|at| at as u8).collect();
        (name.to_owned(), dtype, sizes.to_vec(), bytes)
    };
    let mut metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    metadata.extend(sharding.map(|text| ("DCP_SHARDING_INFO".to_owned(), text.to_owned())));
    let tensors: Vec<_> = parts.iter().map(tensor).collect();
    let writer = Writer::safetensors(tensors, metadata, &Limits::default()).unwrap();
    let _durable = writer.save(path).unwrap();
}

/// What Python writes of the offsets.
fn sharding(parts: &[Part<'_>]) -> String {
    let part =
        |&(name, offsets, _): &Part<'_>| format!("\"{name}\": {{\"saved_offsets\": {offsets:?}}}");
    format!("{{{}}}", parts.iter().map(part).collect::<Vec<_>>().join(", "))
}

/// Makes a folder of these files of shards, which get the names that Python gives to those of each rank.
fn folder_of(shards: &[&[Part<'_>]]) -> Temporary {
    let folder = Temporary::new();
    fs::create_dir(folder.run()).unwrap();
    for (rank, parts) in (1..).zip(shards) {
        write(&shard(&folder, rank), parts, Dtype::Uint8, Some(&sharding(parts)));
    }
    folder
}

fn shard(folder: &Temporary, rank: usize) -> PathBuf {
    folder.run().join(format!("shard-{rank:05}-model-00001-of-00001.safetensors"))
}

/// The shape and the bytes of the tensor `x` of a folder of these shards.
fn opened(shards: &[&[Part<'_>]]) -> Result<(Vec<i64>, Vec<u8>)> {
    let folder = folder_of(shards);
    let file = TorchFile::open(folder.run())?;
    file.verify()?;
    let tensors = file.tensors();
    let (_, tensor) = tensors.iter().find(|(name, _)| name == "x").unwrap();
    Ok((tensor.shape.clone(), file.to_vec(tensor)?))
}

fn refused(result: Result<impl Sized>) -> String {
    match result {
        Err(error @ (Error::Malformed { .. } | Error::TooMuch { .. })) => error.to_string(),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("it is not refused"),
    }
}

#[test]
fn a_tensor_reaches_as_far_as_its_pieces_which_are_every_element_once() {
    let rows: &[&[Part<'_>]] = &[&[("x", &[0, 0], &[1, 2])], &[("x", &[1, 0], &[2, 2])]];
    assert_eq!(opened(rows).unwrap(), (vec![3, 2], vec![0, 1, 0, 1, 2, 3]));
    let columns: &[&[Part<'_>]] = &[&[("x", &[0, 1], &[2, 2])], &[("x", &[0, 0], &[2, 1])]];
    assert_eq!(opened(columns).unwrap(), (vec![2, 3], vec![0, 0, 1, 1, 2, 3]));
    // The same piece on two ranks, one without elements, and a number.
    let copies: &[&[Part<'_>]] =
        &[&[("x", &[0], &[2])], &[("x", &[0], &[2])], &[("x", &[2], &[0]), ("n", &[], &[])]];
    assert_eq!(opened(copies).unwrap(), (vec![2], vec![0, 1]));
    assert_eq!(opened(&[&[("x", &[0, 0], &[0, 3])]]).unwrap(), (vec![0, 3], vec![]));
    assert_eq!(opened(&[&[("x", &[], &[])], &[("x", &[], &[])]]).unwrap(), (vec![], vec![0]));
    let most = i64::MAX;
    let wrong: [(&[&[Part<'_>]], &str); 9] = [
        (&[&[("x", &[0], &[2])], &[("x", &[3], &[2])]], "a file with the rest of it is missing"),
        (&[&[("x", &[2], &[2])]], "not all of it"),
        (&[&[("x", &[0], &[3])], &[("x", &[2], &[2])]], "pieces that overlap"),
        (&[&[("x", &[0, 0], &[2, 2])], &[("x", &[1, 1], &[2, 1])]], "pieces that overlap"),
        (
            &[&[("x", &[0, 0], &[2, 2])], &[("x", &[1, 0], &[1, 3])], &[("x", &[0, 2], &[1, 1])]],
            "pieces that overlap",
        ),
        (&[&[("x", &[0, 0], &[2])]], "another number of dimensions"),
        (&[&[("x", &[0], &[2])], &[("x", &[0, 0], &[2, 1])]], "different numbers of dimensions"),
        (&[&[("x", &[most], &[2])]], "beyond what a tensor can have"),
        (&[&[("x", &[most - 2, most - 2], &[2, 2])]], "more elements than"),
    ];
    for (shards, expected) in wrong {
        let error = refused(opened(shards));
        assert!(error.contains(expected) && error.contains("storage x"), "{expected}: {error}");
    }
}

/// The first and the last one say how far a tensor reaches, and so only one between them is known to be missing.
#[test]
fn a_missing_shard_is_named() {
    let part = |at: i64| [("x", [at], [1])];
    let parts: Vec<_> = (0..4).map(part).collect();
    let parts: Vec<Vec<Part<'_>>> =
        parts.iter().map(|it| it.iter().map(|(n, o, s)| (*n, &o[..], &s[..])).collect()).collect();
    let parts: Vec<_> = parts.iter().map(Vec::as_slice).collect();
    let folder = folder_of(&parts);
    assert_eq!(TorchFile::open(folder.run()).unwrap().tensors()[0].1.shape, [4]);
    fs::remove_file(shard(&folder, 3)).unwrap();
    let error = refused(TorchFile::open(folder.run()));
    assert!(error.contains("perhaps `shard-00003-model-00001-of-00001.safetensors`"), "{error}");
    fs::rename(shard(&folder, 1), folder.run().join("a.safetensors")).unwrap();
    let error = refused(TorchFile::open(folder.run()));
    assert!(error.contains("perhaps `shard-00003-"), "{error}");
}

#[test]
fn what_a_shard_says_of_its_tensors_is_checked() {
    let parts: &[Part<'_>] = &[("x", &[0], &[2]), ("y", &[0], &[1])];
    let folder = folder_of(&[parts]);
    let path = shard(&folder, 1);
    let open = |text: Option<&str>| {
        write(&path, parts, Dtype::Uint8, text);
        TorchFile::open(folder.run())
    };
    let more =
        r#"{"x": {"a": [[{}]], "saved_offsets": [0]}, "other": 3, "y": {"saved_offsets": [0]}}"#;
    assert_eq!(open(Some(more)).unwrap().tensors().len(), 2);
    let deep = format!("{{\"other\": {}{}", "[".repeat(100_000), "]".repeat(100_000));
    let dims = format!("{{\"x\": {{\"saved_offsets\": [{}0]}}}}", "0,".repeat(64));
    for (text, expected) in [
        (r#"{"y": {"saved_offsets": [0]}}"#, "does not say where `x` begins"),
        (r#"{"x": {"saved_offsets": [-1]}}"#, "-1"),
        (r#"{"x": {"saved_offsets": [0.5]}}"#, "0.5"),
        (r#"{"x": {"saved_offsets": [18446744073709551615]}}"#, "out of range"),
        (r#"{"x": {"saved_offsets": 0}}"#, "invalid type"),
        (r#"{"x": {}}"#, "missing field `saved_offsets`"),
        (r#"{"x": {"saved_offsets": [0]}, "x": {"saved_offsets": [0]}}"#, "`x` occurs twice"),
        (r#"{"x": {"saved_offsets": [0]}"#, "EOF"),
        (r#"{"x": {"saved_offsets": [0]}, "y": {"saved_offsets": [0]}} x"#, "trailing"),
        ("[]", "invalid type"),
        (&deep, "EOF"),
        (&dims, "more than 64 dimensions"),
    ] {
        let error = refused(open(Some(text)));
        assert!(error.contains(expected) && error.contains("DCP_SHARDING_INFO"), "{error}");
        assert!(error.contains("shard-00001"), "{error}");
    }
    // Python takes an empty text for none.
    for text in [None, Some("")] {
        let error = refused(open(text));
        assert!(error.contains("no `DCP_SHARDING_INFO`, without which it is no shard"), "{error}");
    }
    // By itself it is a file as any other.
    assert_eq!(TorchFile::open(&path).unwrap().tensors().len(), 2);
}

#[test]
fn pieces_of_different_dtypes_are_refused_and_every_dtype_is_read() {
    let (first, second): (&[Part<'_>], &[Part<'_>]) = (&[("x", &[0], &[2])], &[("x", &[2], &[2])]);
    let folder = folder_of(&[]);
    let write = |rank, parts: &[Part<'_>], dtype| {
        write(&shard(&folder, rank), parts, dtype, Some(&sharding(parts)));
    };
    for dtype in Dtype::ALL.into_iter().filter(|dtype| dtype.safetensors_name().is_some()) {
        write(1, first, dtype);
        write(2, second, dtype);
        let file = TorchFile::open(folder.run()).unwrap();
        let tensor = file.tensors()[0].1.clone();
        assert_eq!((tensor.dtype, &tensor.shape[..]), (dtype, &[4][..]));
        let mut bytes = vec![0; 4 * dtype.size()];
        file.read(&tensor, &mut bytes).unwrap();
        let half: Vec<_> = (0..2 * dtype.size() as u8).collect();
        assert_eq!(bytes, [&half[..], &half].concat(), "{dtype}");
    }
    write(1, first, Dtype::Int8);
    write(2, second, Dtype::Uint8);
    let error = refused(TorchFile::open(folder.run()));
    assert!(error.contains("storage x") && error.contains("different dtypes"), "{error}");
    // One that this crate does not have.
    let header = r#"{"__metadata__":{"DCP_SHARDING_INFO":"{\"x\":{\"saved_offsets\":[0]}}"},"x":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}"#;
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), b"ab"].concat();
    fs::write(shard(&folder, 1), bytes).unwrap();
    let file = TorchFile::open(folder.run()).unwrap();
    assert!(matches!(file.value().get("x"), Some(Value::Opaque(_))), "{:?}", file.value());
}

#[test]
fn an_index_names_the_shards_to_read() {
    let parts: [&[Part<'_>]; 3] = [
        &[("x", &[0], &[2]), ("a", &[0], &[1])],
        &[("x", &[2], &[1]), ("b", &[0], &[1])],
        &[("x", &[0], &[9])],
    ];
    let folder = folder_of(&parts);
    fs::rename(shard(&folder, 1), folder.run().join("one.safetensors")).unwrap();
    fs::rename(shard(&folder, 2), folder.run().join("two.safetensors")).unwrap();
    write(&folder.run().join("plain.safetensors"), &[("p", &[], &[2, 2])], Dtype::Uint8, None);
    let index = |map: &str| {
        let text = format!("{{\"metadata\": {{\"total_size\": 9}}, \"weight_map\": {{{map}}}}}");
        fs::write(folder.run().join(INDEX), text).unwrap();
        [folder.run(), folder.run().join(INDEX)].map(TorchFile::open)
    };
    // The third shard is not named, and neither is `a`.
    let map = r#""x": "one.safetensors", "b": "two.safetensors", "p": "plain.safetensors""#;
    for file in index(map) {
        let file = file.unwrap();
        assert_eq!((file.kind(), file.path()), (FileKind::Index, &*folder.run().join(INDEX)));
        let found = "{b:<torch.uint8[1]00>;p:<torch.uint8[2,2]00010203>;x:<torch.uint8[3]000100>;}";
        assert_eq!(dumped(&file), found);
    }
    for (map, expected) in [
        (r#""x": "one.safetensors""#, "not all of it"),
        (r#""a": "two.safetensors""#, "`a` is not in `two.safetensors`"),
        (r#""z": "one.safetensors""#, "`z` is not in `one.safetensors`"),
    ] {
        match (expected, index(map)) {
            // By the first shard alone it would be whole.
            ("not all of it", files) => files.into_iter().for_each(|file| {
                assert_eq!(file.unwrap().tensors()[0].1.shape, [2]);
            }),
            (expected, files) => files.into_iter().for_each(|file| {
                let error = refused(file);
                assert!(error.contains(expected), "{error}");
            }),
        }
    }
    for file in index(r#""x": "gone.safetensors""#) {
        assert!(matches!(file, Err(Error::Io { .. })), "{file:?}");
    }
}

#[test]
fn a_folder_of_neither_kind_says_what_it_lacks() {
    let folder = Temporary::new();
    fs::create_dir(folder.run()).unwrap();
    fs::write(folder.run().join("notes"), "").unwrap();
    let error = TorchFile::open(folder.run()).unwrap_err();
    assert!(matches!(&error, Error::Io { path, .. } if path.ends_with(".metadata")), "{error}");
    // Pieces of the other kind are those of a save that has not finished.
    fs::write(folder.run().join("__0_0.distcp"), "").unwrap();
    let error = refused(TorchFile::open(folder.run()));
    assert!(error.contains("its save has not finished"), "{error}");
    // A folder in the place of a file, and a file that is none.
    fs::create_dir(folder.run().join("x.safetensors")).unwrap();
    let error = TorchFile::open(folder.run()).unwrap_err();
    assert!(error.to_string().contains("not a regular file"), "{error}");
    fs::remove_dir(folder.run().join("x.safetensors")).unwrap();
    fs::write(folder.run().join("x.safetensors"), "nothing of the kind").unwrap();
    refused(TorchFile::open(folder.run()));
}

#[test]
fn limits_bound_shards_together() {
    let parts: [&[Part<'_>]; 3] =
        [&[("x", &[0], &[2])], &[("x", &[2], &[1]), ("b", &[0], &[1])], &[("c", &[0], &[9])]];
    let folder = folder_of(&parts);
    let open = |limits: Limits| TorchFile::open_with(folder.run(), &limits);
    let default = Limits::default;
    assert!(open(Limits { max_tensors: 4, max_records: 3, ..default() }).is_ok());
    let error = refused(open(Limits { max_tensors: 3, ..default() }));
    assert!(error.contains("more than 3 tensors"), "{error}");
    let error = refused(open(Limits { max_records: 2, ..default() }));
    assert!(error.contains("more than 2 files"), "{error}");
    refused(open(Limits { max_header_bytes: 60, ..default() }));
    let map = r#"{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}"#;
    fs::write(folder.run().join(INDEX), map).unwrap();
    let error = refused(open(Limits { max_records: 1, ..default() }));
    assert!(error.contains("more than 1 files"), "{error}");
}

fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap()
}

/// What other programs read of the files of a save, and what this crate adds.
#[test]
fn what_is_saved_is_a_model_in_several_files() {
    let folder = Temporary::new();
    let begun = SharedSave::begin(folder.run(), FolderKind::Safetensors).unwrap();
    let tensor = |name: &str, shape: &[i64]| {
        let len = shape.iter().product::<i64>() as usize;
        (name.to_owned(), Dtype::Uint8, shape.to_vec(), vec![7; len])
    };
    let metadata = BTreeMap::from([("a".to_owned(), "\"ä\n".to_owned())]);
    let mut shares = Vec::new();
    let all = [vec![tensor("m/x", &[2, 3]), tensor("n", &[])], vec![], vec![tensor("m/y", &[0])]];
    for (rank, tensors) in all.into_iter().enumerate() {
        let metadata = if rank == 1 { metadata.clone() } else { BTreeMap::new() };
        let mut writer = ShardWriter::new(tensors, metadata, &Limits::default()).unwrap();
        shares.push(writer.save_share(&begun, rank as u64).unwrap());
    }
    let _durable = begun.finish(shares, &Limits::default()).unwrap();
    let [first, third] = [0, 2].map(|rank| file_of(FolderKind::Safetensors, rank, 0));
    assert_eq!(first, "shard-00001-model-00001-of-00001.safetensors");
    let index: serde_json::Value = serde_json::from_str(&text(&folder.run().join(INDEX))).unwrap();
    assert_eq!(index["metadata"]["total_size"], 7);
    assert_eq!(index["weight_map"], serde_json::json!({"m/x": first, "m/y": third, "n": first}));
    let file = TorchFile::open(folder.run()).unwrap();
    file.verify().unwrap();
    assert_eq!(file.metadata(), &metadata);
    let found = "{m/x:<torch.uint8[2,3]070707070707>;m/y:<torch.uint8[0]>;n:<torch.uint8[]07>;}";
    assert_eq!(dumped(&file), found);
    let shard = TorchFile::open(folder.run().join(first)).unwrap();
    let own = shard.metadata();
    let offsets = r#"{"m/x":{"saved_offsets":[0,0]},"n":{"saved_offsets":[]}}"#;
    assert_eq!((&*own["format"], &*own["DCP_VERSION"]), ("pt", "1.0"));
    assert_eq!(own["DCP_SHARDING_INFO"], offsets);
    for key in ["torch_files", "total_size"] {
        let metadata = BTreeMap::from([(key.to_owned(), String::new())]);
        let writer = ShardWriter::<Vec<u8>>::new([], metadata, &Limits::default());
        let error = writer.map(drop).unwrap_err();
        assert!(matches!(&error, Error::Unwritable { entry: Some(name), .. } if name == key));
        assert!(error.to_string().contains("the index has this entry itself"), "{error}");
    }
}

/// Begins a save whose process is killed after it has written its shard.
fn save_killed(folder: &Path) -> String {
    let begun = SharedSave::begin(folder, FolderKind::Safetensors).unwrap();
    let tensor = ("x".to_owned(), Dtype::Uint8, vec![1], vec![9]);
    let mut writer = ShardWriter::new([tensor], BTreeMap::new(), &Limits::default()).unwrap();
    writer.save_share(&begun, 0).unwrap();
    begun.name_of(0)
}

/// They are a whole checkpoint without an index.
#[test]
fn shards_of_python_are_no_leftovers() {
    let folder = folder_of(&[&[("x", &[0], &[2])], &[("x", &[2], &[2])]]);
    let leftover = || remove_leftover(&folder.run(), Duration::ZERO).unwrap();
    let pythons = listed(&folder.run());
    let content = dumped(&TorchFile::open(folder.run()).unwrap());
    assert!(!leftover());
    remove(&folder.run()).unwrap();
    assert_eq!(listed(&folder.run()), pythons);
    // A file that cannot be read is not one of this crate, which writes each as a whole.
    let half = folder.run().join(file_of(FolderKind::Safetensors, 2, 0));
    fs::write(&half, "half").unwrap();
    assert!(!leftover());
    fs::remove_file(half).unwrap();
    // One of this crate among them does not make them leftovers, and is all that `remove` takes.
    let own = save_killed(&folder.run());
    assert!(!leftover());
    let bytes = fs::read(folder.run().join(&own)).unwrap();
    fs::write(folder.run().join(&own), [&bytes[..bytes.len() - 1], b"!"].concat()).unwrap();
    let file = TorchFile::open(folder.run()).unwrap();
    file.verify().unwrap();
    assert_eq!(dumped(&file), content, "whatever is in that one");
    remove(&folder.run()).unwrap();
    assert!(!folder.run().join(own).exists());
    assert_eq!(listed(&folder.run()), pythons);
    // Python has saved to a folder that this crate has replaced once.
    let other = Temporary::new();
    save_small(FolderKind::Safetensors, &other.run(), 1).unwrap();
    save_small(FolderKind::Safetensors, &other.run(), 2).unwrap();
    let all: Vec<_> = listed(&other.run()).into_iter().chain(pythons.clone()).collect();
    for name in &pythons {
        fs::copy(folder.run().join(name), other.run().join(name)).unwrap();
    }
    let own = save_killed(&other.run());
    assert!(remove_leftover(&other.run(), Duration::ZERO).unwrap());
    assert!(!other.run().join(own).exists());
    assert_eq!(BTreeSet::from_iter(listed(&other.run())), BTreeSet::from_iter(all));
}

/// Writes a model as other programs do, in two files that an index names, and one beside them.
fn save_by_another(folder: &Path) -> Vec<String> {
    let names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    for (name, tensor) in names.into_iter().zip(["a", "b"]) {
        write(&folder.join(name), &[(tensor, &[0], &[2])], Dtype::Uint8, None);
    }
    let map = format!(r#"{{"a": "{}", "b": "{}"}}"#, names[0], names[1]);
    // An entry of the name of this crate's own is nothing to it.
    let index = format!(r#"{{"metadata": {{"torch_files": "4"}}, "weight_map": {map}}}"#);
    fs::write(folder.join(INDEX), index).unwrap();
    fs::write(folder.join("config.json"), "{}").unwrap();
    listed(folder)
}

#[test]
fn the_model_of_another_program_is_not_replaced_or_removed() {
    let kind = FolderKind::Safetensors;
    let folder = Temporary::new();
    fs::create_dir(folder.run()).unwrap();
    let before = save_by_another(&folder.run());
    for refused in [save_small(kind, &folder.run(), 1), remove(&folder.run())] {
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("a model which another program has saved"), "{error}");
    }
    // Nor are shards of this crate removed, of two saves, whose index it may have replaced.
    for number in [0, 1] {
        let from = Temporary::new();
        save_small(kind, &from.run(), 1).unwrap();
        let [from, to] = [(from.run(), 0), (folder.run(), number)]
            .map(|(folder, number)| folder.join(file_of(kind, 0, number)));
        fs::copy(from, to).unwrap();
    }
    assert!(!remove_leftover(&folder.run(), Duration::ZERO).unwrap());
    assert_eq!(listed(&folder.run()).len(), before.len() + 2);
    let file = TorchFile::open(folder.run()).unwrap();
    assert_eq!(dumped(&file), "{a:<torch.uint8[2]0001>;b:<torch.uint8[2]0001>;}");
    assert_eq!(file.metadata()["torch_files"], "4");
    // An index that is no JSON any more is replaced, as other damaged checkpoints are.
    fs::write(folder.run().join(INDEX), "half").unwrap();
    save_small(kind, &folder.run(), 1).unwrap();
    // A model that another program has saved into a checkpoint of the other kind.
    let folder = Temporary::new();
    save_small(FolderKind::Distcp, &folder.run(), 1).unwrap();
    for name in listed(&folder.run()) {
        fs::rename(folder.run().join(&name), folder.path().join(&name)).unwrap();
    }
    let mut model = save_by_another(&folder.run());
    model.push(file_of(kind, 0, 0));
    write(&folder.run().join(&model[4]), &[("c", &[0], &[2])], Dtype::Uint8, None);
    for name in listed(folder.path()).iter().filter(|name| *name != "run") {
        fs::rename(folder.path().join(name), folder.run().join(name)).unwrap();
    }
    remove(&folder.run()).unwrap();
    assert_eq!(BTreeSet::from_iter(listed(&folder.run())), BTreeSet::from_iter(model));
}

#[test]
fn shards_of_two_saves_are_refused() {
    let parts: &[Part<'_>] = &[("x", &[0], &[2])];
    let folder = folder_of(&[parts]);
    let others = ["shard-00001-model-00001-of-00002", "shard-00001-model-00002-of-00002"]
        .map(|name| folder.run().join(format!("{name}.safetensors")));
    for (path, parts) in others.iter().zip([&[("y", &[0][..], &[2][..])], &[("z", &[0], &[1])]]) {
        write(path, parts, Dtype::Uint8, Some(&sharding(parts)));
    }
    let error = refused(TorchFile::open(folder.run()));
    assert!(error.contains("`shard-00001-model-00001-of-00001.safetensors` and `"), "{error}");
    assert!(error.contains("are of two saves; remove the files of the older one"), "{error}");
    fs::remove_file(shard(&folder, 1)).unwrap();
    assert_eq!(TorchFile::open(folder.run()).unwrap().tensors().len(), 2);
    // Other names say nothing.
    for name in ["model-00001-of-00001.safetensors", "shard-of-3"] {
        write(&folder.run().join(name), parts, Dtype::Uint8, Some(&sharding(parts)));
    }
    assert_eq!(TorchFile::open(folder.run()).unwrap().tensors().len(), 3);
}

#[test]
fn a_shard_alone_is_known() {
    let is_known = |path: &Path| {
        let by_bytes = TorchFile::from_bytes(fs::read(path).unwrap()).unwrap();
        [TorchFile::open(path).unwrap(), by_bytes].map(|file| file.is_one_of_shards())
    };
    let (first, later): (&[Part<'_>], &[Part<'_>]) =
        (&[("x", &[0, 0], &[2, 1])], &[("y", &[0], &[1]), ("x", &[0, 1], &[2, 1])]);
    let folder = folder_of(&[first]);
    let alone = shard(&folder, 1);
    assert_eq!(is_known(&alone), [false; 2], "it may be all");
    write(&folder.run().join("a.safetensors"), first, Dtype::Uint8, Some(&sharding(first)));
    assert_eq!(is_known(&alone), [false; 2], "another file says nothing of it");
    write(&shard(&folder, 2), first, Dtype::Uint8, None);
    assert_eq!(is_known(&alone), [true, false], "there is another rank");
    assert_eq!(is_known(&shard(&folder, 2)), [false; 2], "it is no shard");
    assert_eq!(is_known(&folder.run().join("a.safetensors")), [false; 2], "nor is its name");
    write(&alone, later, Dtype::Uint8, Some(&sharding(later)));
    fs::rename(&alone, folder.path().join("alone")).unwrap();
    assert_eq!(is_known(&folder.path().join("alone")), [true; 2], "it begins later");
    let own = folder.path().join(save_killed(&folder.path().join("own")));
    fs::rename(folder.path().join("own").join(own.file_name().unwrap()), &own).unwrap();
    assert_eq!(is_known(&own), [true; 2], "its index has the others");
    // The entry of this crate is one of another program, unless it has checksums.
    let text = fs::read(&own).unwrap();
    let at = text.windows(16).position(|digits| digits.iter().all(u8::is_ascii_hexdigit)).unwrap();
    fs::write(&own, [&text[..at], b"x", &text[at + 1..]].concat()).unwrap();
    assert_eq!(is_known(&own), [false; 2]);
}

/// Without the index, which is written last, nothing of a save is read.
#[test]
fn shards_of_a_save_that_has_not_finished_are_nobodys() {
    let folder = folder_of(&[&[("x", &[0], &[2])], &[("x", &[2], &[2])]]);
    let before = dumped(&TorchFile::open(folder.run()).unwrap());
    let begun = SharedSave::begin(folder.run(), FolderKind::Safetensors).unwrap();
    assert_eq!(begun.number(), 2, "after that of Python's files");
    let tensor = ("x".to_owned(), Dtype::Uint8, vec![1], vec![9]);
    let mut writer = ShardWriter::new([tensor], BTreeMap::new(), &Limits::default()).unwrap();
    let share = writer.save_share(&begun, 0).unwrap();
    assert_eq!(dumped(&TorchFile::open(folder.run()).unwrap()), before, "Python's shards are");
    let _durable = begun.finish([share], &Limits::default()).unwrap();
    assert_eq!(dumped(&TorchFile::open(folder.run()).unwrap()), "{x:<torch.uint8[1]09>;}");
    assert_eq!(listed(&folder.run()).len(), 2, "and then they are gone");
    fs::remove_file(folder.run().join(INDEX)).unwrap();
    let error = refused(TorchFile::open(folder.run()));
    assert!(error.contains("its save has not finished"), "{error}");
}

#[test]
fn damage_is_found_wherever_it_is() {
    let folder = Temporary::new();
    save_small(FolderKind::Safetensors, &folder.run(), 3).unwrap();
    let read = || {
        let file = TorchFile::open(folder.run())?;
        file.verify()?;
        Ok(())
    };
    let right: Result<()> = read();
    right.unwrap();
    for name in listed(&folder.run()) {
        let path = folder.run().join(&name);
        let bytes = fs::read(&path).unwrap();
        for at in 0..bytes.len() {
            for flip in [0x01, 0x20, 0xff] {
                let mut damaged = bytes.clone();
                damaged[at] ^= flip;
                fs::write(&path, &damaged).unwrap();
                let error = read().expect_err(&format!("byte {at} of {name} by {flip}"));
                assert!(matches!(error, Error::Malformed { .. }), "{error}");
            }
            fs::write(&path, &bytes[..at]).unwrap();
            assert!(read().is_err(), "cut to {at}");
        }
        fs::write(&path, &bytes).unwrap();
    }
    read().unwrap();
    // A file of the same tensors that another save has written.
    let other = Temporary::new();
    save_small(FolderKind::Safetensors, &other.run(), 4).unwrap();
    let name = file_of(FolderKind::Safetensors, 0, 0);
    fs::copy(other.run().join(&name), folder.run().join(&name)).unwrap();
    let error = refused(read());
    assert!(error.contains("not the file that its index was written for"), "{error}");
    fs::remove_file(folder.run().join(&name)).unwrap();
    let error = refused(read());
    assert!(error.contains("is missing"), "{error}");
}

/// Another process replaces the folder while this one opens it.
#[test]
fn a_folder_that_is_replaced_is_opened_old_or_new() {
    for kind in FolderKind::ALL {
        let folder = Temporary::new();
        save_small(kind, &folder.run(), 0).unwrap();
        let known: Vec<_> = (0..2)
            .map(|seed| {
                save_small(kind, &folder.run(), seed).unwrap();
                dumped(&TorchFile::open(folder.run()).unwrap())
            })
            .collect();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                (0..60u8).for_each(|turn| save_small(kind, &folder.run(), turn % 2).unwrap());
            });
            while !writer.is_finished() {
                let file = TorchFile::open(folder.run()).unwrap();
                file.verify().unwrap();
                assert!(known.contains(&dumped(&file)));
            }
        });
    }
}

/// Each byte of the header of a shard damaged: it is refused, or read within its file, and never panics.
#[test]
fn damaged_shards_never_panic() {
    let parts: [&[Part<'_>]; 2] = [&[("x", &[0, 0], &[2, 2])], &[("x", &[2, 0], &[1, 2])]];
    let folder = folder_of(&parts);
    let path = shard(&folder, 2);
    let bytes = fs::read(&path).unwrap();
    let mut random = 7u64;
    let (mut read, mut wrong) = (0, 0);
    for at in 0..bytes.len() {
        for _ in 0..4 {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let mut damaged = bytes.clone();
            damaged[at] = (random >> 56) as u8;
            fs::write(&path, &damaged).unwrap();
            let Ok(file) = TorchFile::open(folder.run()) else {
                wrong += 1;
                continue;
            };
            for (_, tensor) in file.tensors() {
                assert!(tensor.size_in_bytes() <= 8, "{tensor:?}");
                let mut bytes = vec![0; tensor.size_in_bytes() as usize];
                file.read(tensor, &mut bytes).unwrap();
            }
            read += 1;
        }
    }
    assert!(read > 0 && wrong > read, "{read} {wrong}");
}
