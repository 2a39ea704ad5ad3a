//! Tests against Python: this crate reads the folders that Python saves on one and several ranks, and Python reads
//! those of this crate.

use std::process::Command;

use super::*;

/// Runs a script beside this file. Returns `None` without a Python to compare with, which is a failure with
/// `TCH_AMP_REQUIRE_PYTHON=1`.
fn oracle(script: &str, args: &[&Path]) -> Option<String> {
    let python = std::env::var_os("TCH_AMP_PYTHON");
    let required = std::env::var_os("TCH_AMP_REQUIRE_PYTHON").is_some_and(|value| value == "1");
    assert!(python.is_some() || !required, "TCH_AMP_PYTHON names no Python");
    let Some(python) = python else {
        println!("skipped: set TCH_AMP_PYTHON to a Python with torch");
        return None;
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/distributed/tests").join(script);
    let mut command = Command::new(python);
    command.args(["-B", "-W", "ignore"]).arg(script).args(args);
    let output = command.env_remove("LD_LIBRARY_PATH").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8(output.stdout).unwrap())
}

/// Reads what a script saves, which are so many folders.
fn assert_read(script: &str, kind: FileKind, folders: usize) {
    let folder = Temporary::new();
    let Some(answer) = oracle(script, &[Path::new("make"), folder.path()]) else { return };
    let lines: Vec<_> = answer.lines().collect();
    assert_eq!(lines.len(), folders);
    for line in lines {
        let (path, expected) = line.split_once(' ').unwrap();
        let file = TorchFile::open(path).unwrap();
        file.verify().unwrap();
        assert_eq!(file.kind(), kind, "{path}");
        assert_eq!(dumped(&file), expected, "{path}");
        assert_parts_are_read(&file);
    }
}

#[test]
fn what_python_saves_on_any_number_of_ranks_is_read() {
    assert_read("oracle.py", FileKind::Distributed, 5);
}

/// Two by one process, with an index, and four by each number of ranks, of which one is consolidated.
#[test]
fn shards_that_python_saves_on_any_number_of_ranks_are_read() {
    assert_read("shards.py", FileKind::Index, 14);
}

/// Reads each tensor in parts of some elements, as a target on a device does.
fn assert_parts_are_read(file: &TorchFile) {
    for (name, tensor) in file.tensors() {
        if !tensor.is_contiguous() {
            continue;
        }
        let width = tensor.dtype.size();
        let mut whole = vec![0; usize::try_from(tensor.size_in_bytes()).unwrap()];
        file.read(tensor, &mut whole).unwrap();
        let numel = whole.len() / width;
        for step in [1, 7, 1000].into_iter().filter(|step| numel / step < 5000) {
            for start in (0..numel).step_by(step) {
                let end = (start + step).min(numel);
                let part = TensorRef {
                    offset: tensor.offset + start as u64,
                    shape: vec![(end - start) as i64],
                    strides: vec![1],
                    ..tensor.clone()
                };
                let mut bytes = vec![0; (end - start) * width];
                file.read(&part, &mut bytes).unwrap();
                assert_eq!(bytes, whole[start * width..end * width], "{name} from {start}");
            }
        }
    }
}

#[test]
fn python_reads_what_is_saved() {
    let folder = Temporary::new();
    let (value, storages) = small(5);
    let Value::Dict(mut items) = value else { panic!("a dict") };
    // Python drops empty dicts.
    items.retain(|(_, item)| *item != dict(&[]));
    for (_, item) in &mut items {
        if let Value::List(items) = item {
            items.retain(|item| *item != dict(&[]));
        }
    }
    let mut storages = storages;
    for dtype in Dtype::ALL {
        let key = storages.len().to_string();
        let bytes = 3 * u8::try_from(dtype.size()).unwrap();
        storages.push(if dtype == Dtype::Bool { vec![1, 0, 1] } else { (1..=bytes).collect() });
        let tensor = TensorRef::contiguous(key, dtype, vec![3, 1]);
        items.push((format!("täst 🦀 {dtype}").as_str().into(), tensor.into()));
    }
    let ints = [0, 255, 256, 65_535, 65_536, -1, -129, 1 << 40, i64::MIN, i64::MAX];
    items.push(("ints".into(), Value::List(ints.map(Value::Int).to_vec())));
    let value = Value::Dict(items);
    save(&folder.run(), &value, &storages).unwrap();
    let expected = dumped(&TorchFile::open(folder.run()).unwrap());
    // Once more, which replaces it.
    save(&folder.run(), &value, &storages).unwrap();
    let Some(answer) = oracle("oracle.py", &[Path::new("dump"), &folder.run()]) else { return };
    let lines: Vec<_> = answer.lines().collect();
    assert_eq!(lines.len(), 2);
    for line in lines {
        assert_eq!(line, expected);
    }
}

/// By Python's reader of shards, of whose files each has some tensors.
#[test]
fn python_reads_shards_that_are_saved() {
    let folder = Temporary::new();
    let mut paths = Vec::new();
    let mut expected = Vec::new();
    for ranks in [1, 2, 4] {
        let path = folder.path().join(ranks.to_string());
        let begun = SharedSave::begin(&path, FolderKind::Safetensors).unwrap();
        let share = |rank| {
            let has = |dtype: &Dtype| dtype.safetensors_name().is_some();
            let own = Dtype::ALL.into_iter().filter(has).skip(rank).step_by(ranks);
            let tensors = own.map(|dtype| {
                let bytes = 3 * u8::try_from(dtype.size()).unwrap();
                let bytes: Vec<_> =
                    if dtype == Dtype::Bool { vec![1, 0, 1] } else { (1..=bytes).collect() };
                (format!("täst 🦀/{dtype}"), dtype, vec![3, 1], bytes)
            });
            let metadata = (rank == 0).then(|| ("step".to_owned(), "7".to_owned()));
            let metadata = metadata.into_iter().collect();
            let mut writer = ShardWriter::new(tensors, metadata, &Limits::default()).unwrap();
            writer.save_share(&begun, rank as u64).unwrap()
        };
        let _durable = begun.finish((0..ranks).map(share), &Limits::default()).unwrap();
        expected.push(dumped(&TorchFile::open(&path).unwrap()));
        paths.push(path);
    }
    let paths: Vec<_> =
        [Path::new("dump")].into_iter().chain(paths.iter().map(|it| &**it)).collect();
    let Some(answer) = oracle("shards.py", &paths) else { return };
    assert_eq!(answer.lines().collect::<Vec<_>>(), expected);
}
