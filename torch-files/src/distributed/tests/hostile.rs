//! Tests that damaged and hostile folders are refused, and that everything that one can ask for is bounded.

use super::*;
use crate::distributed::{INDEX, trailer};
use crate::error::Error;
use crate::pickle;
use crate::pickle::{Entry, Kind, PathItem};
use crate::writer::Writer;

fn entry(
    name: &str,
    shape: &[i64],
    offsets: &[i64],
    sizes: &[i64],
    [start, len]: [u64; 2],
) -> Entry {
    Entry {
        name: name.to_owned(),
        path: vec![PathItem::Key(name.to_owned())],
        kind: Kind::Tensor {
            dtype: Dtype::Uint8,
            shape: shape.to_vec(),
            offsets: offsets.to_vec(),
            sizes: sizes.to_vec(),
        },
        file: "__0_0.distcp".to_owned(),
        start,
        len,
    }
}

/// The archive of a tensor of bytes.
fn archive(shape: &[i64]) -> Vec<u8> {
    archive_of(TensorRef::contiguous("0", Dtype::Uint8, shape.to_vec()))
}

fn archive_of(tensor: TensorRef) -> Vec<u8> {
    let numel: i64 = tensor.shape.iter().product();
    let bytes = (0..numel).map(|at| at as u8).collect();
    let writer = Writer::<Vec<u8>>::torch(&tensor.into(), [bytes], &Limits::default()).unwrap();
    let mut out = std::io::Cursor::new(Vec::new());
    writer.write_to(&mut out).unwrap();
    out.into_inner()
}

/// Writes a folder of these entries and archives, one after the other.
fn written(folder: &Path, entries: &[Entry], archives: &[Vec<u8>]) {
    fs::create_dir_all(folder).unwrap();
    let index = pickle::write_index(entries, &Limits::default()).unwrap();
    fs::write(folder.join(INDEX), index).unwrap();
    fs::write(folder.join("__0_0.distcp"), archives.concat()).unwrap();
}

/// The offsets and the sizes of a piece.
type Piece<'a> = (&'a [i64], &'a [i64]);

/// Writes a folder of the tensor `x` in pieces, given the offsets and the sizes of each. Returns what a reader says.
fn of_pieces(shape: &[i64], pieces: &[Piece<'_>]) -> Result<Vec<u8>> {
    let folder = Temporary::new();
    let archives: Vec<_> = pieces.iter().map(|(_, sizes)| archive(sizes)).collect();
    let mut start = 0;
    let mut entries = Vec::new();
    for ((offsets, sizes), archive) in pieces.iter().zip(&archives) {
        let len = archive.len() as u64;
        entries.push(entry("x", shape, offsets, sizes, [start, len]));
        start += len;
    }
    written(&folder.run(), &entries, &archives);
    let file = TorchFile::open(folder.run())?;
    file.verify()?;
    file.to_vec(file.tensors()[0].1)
}

/// A piece that is transposed in its file is read once for all parts of a tensor, and kept until then.
#[test]
fn a_piece_in_another_order_is_read_once() {
    let folder = Temporary::new();
    let tensor = TensorRef::contiguous("0", Dtype::Uint8, vec![2, 6]);
    let made = archive_of(TensorRef { strides: vec![1, 2], ..tensor });
    let len = made.len() as u64;
    let half = |at, start| entry("x", &[4, 6], &[at, 0], &[2, 6], [start, len]);
    written(&folder.run(), &[half(0, 0), half(2, len)], &[made.clone(), made]);
    let file = TorchFile::open(folder.run()).unwrap();
    let whole = file.tensors()[0].1.clone();
    let half = [0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11];
    assert_eq!(file.to_vec::<u8>(&whole).unwrap(), [half, half].concat());
    let part = |offset, len| {
        let part = TensorRef { offset, shape: vec![len], strides: vec![1], ..whole.clone() };
        file.to_vec::<u8>(&part)
    };
    assert_eq!(part(0, 5).unwrap(), half[..5]);
    // From here on nothing can be read of the file.
    fs::write(folder.run().join("__0_0.distcp"), "").unwrap();
    assert_eq!(part(5, 6).unwrap(), half[5..11]);
    assert_eq!(part(11, 1).unwrap(), half[11..]);
    assert!(part(0, 1).is_err(), "it is not kept any longer");
    assert!(part(12, 1).is_err(), "it was not read");
}

#[test]
fn a_tensor_in_pieces_has_no_views_of_another_width() {
    let folder = Temporary::new();
    let made = archive(&[2]);
    let len = made.len() as u64;
    let half = |at, start| entry("x", &[4], &[at], &[2], [start, len]);
    written(&folder.run(), &[half(0, 0), half(2, len)], &[made.clone(), made]);
    let file = TorchFile::open(folder.run()).unwrap();
    let whole = file.tensors()[0].1.clone();
    let wide = TensorRef { dtype: Dtype::Int16, shape: vec![2], ..whole.clone() };
    assert!(matches!(file.read(&wide, &mut [0; 4]), Err(Error::Request(_))));
    let mut bytes = [7; 4];
    file.read(&TensorRef { dtype: Dtype::Int8, ..whole }, &mut bytes).unwrap();
    assert_eq!(bytes, [0, 1, 0, 1]);
}

fn refused(result: Result<impl Sized>) -> String {
    match result {
        Err(error @ (Error::Malformed { .. } | Error::TooMuch { .. })) => error.to_string(),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("it is not refused"),
    }
}

#[test]
fn pieces_are_every_element_once() {
    assert_eq!(of_pieces(&[4], &[(&[0], &[2]), (&[2], &[2])]).unwrap(), [0, 1, 0, 1]);
    let grid: [Piece<'_>; 3] = [(&[0, 0], &[1, 3]), (&[1, 0], &[2, 1]), (&[1, 1], &[2, 2])];
    assert_eq!(of_pieces(&[3, 3], &grid).unwrap(), [0, 1, 2, 0, 0, 1, 1, 2, 3]);
    // Python may list ranks that have nothing.
    assert_eq!(of_pieces(&[2], &[(&[0], &[2]), (&[2], &[0])]).unwrap(), [0, 1]);
    assert!(of_pieces(&[0, 3], &[(&[0, 0], &[0, 3])]).unwrap().is_empty());
    let wrong: [(&[i64], &[Piece<'_>], &str); 8] = [
        (&[2, 2], &[(&[1, 0], &[2, 2])], "reaches out"),
        (&[4], &[(&[0], &[2])], "not all of it"),
        (&[4], &[(&[0], &[2]), (&[1], &[2])], "overlap"),
        (&[3, 2], &[(&[0, 0], &[2, 2]), (&[1, 0], &[1, 2])], "overlap"),
        (&[4], &[(&[0], &[2]), (&[3], &[2])], "reaches out"),
        (&[4], &[(&[0], &[2]), (&[i64::MAX], &[2])], "reaches out"),
        (&[2, 2], &[(&[0], &[4])], "reaches out"),
        (&[i64::MAX, 2], &[(&[0, 0], &[1, 1])], "more elements than"),
    ];
    for (shape, pieces, expected) in wrong {
        let error = refused(of_pieces(shape, pieces));
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn an_index_that_lies_is_refused() {
    let folder = Temporary::new();
    let made = archive(&[2]);
    let len = made.len() as u64;
    let fine = || entry("x", &[2], &[0], &[2], [0, len]);
    let refuse = |entries: &[Entry], expected: &str| {
        written(&folder.run(), entries, &[made.clone(), made.clone()]);
        let error = refused(TorchFile::open(folder.run()));
        assert!(error.contains(expected), "{error}");
    };
    written(&folder.run(), &[fine()], std::slice::from_ref(&made));
    assert!(TorchFile::open(folder.run()).is_ok());
    let other = |change: &dyn Fn(&mut Entry)| {
        let mut entry = fine();
        change(&mut entry);
        [entry]
    };
    for name in ["../x", "/etc/passwd", "a/b", "..", "", "x\u{1b}"] {
        refuse(&other(&|entry| entry.file = name.to_owned()), "not the name of a file");
    }
    refuse(&other(&|entry| entry.file = "__7_0.distcp".to_owned()), "missing");
    refuse(&other(&|entry| entry.start = 1), "zip");
    refuse(&other(&|entry| entry.len = 2 * len + 1), "ends before its last entry");
    refuse(&other(&|entry| entry.start = i64::MAX as u64), "ends before its last entry");
    refuse(&[fine(), entry("y", &[2], &[0], &[2], [len - 1, len])], "overlap");
    refuse(&[fine(), entry("y", &[2], &[0], &[2], [0, len])], "overlap");
    refuse(&[entry("x", &[1], &[0], &[1], [0, len])], "another shape");
    let dtype = other(&|entry| {
        if let Kind::Tensor { dtype, .. } = &mut entry.kind {
            *dtype = Dtype::Int8;
        }
    });
    refuse(&dtype, "another shape or dtype");
    let inside = other(&|entry| entry.path.push(PathItem::Key("z".to_owned())));
    let beside = entry("z", &[2], &[0], &[2], [len, len]);
    let beside = Entry { path: vec![PathItem::Key("x".to_owned())], ..beside };
    refuse(&[inside[0].clone(), beside], "a part of another one");
    let deep = other(&|entry| entry.path = vec![PathItem::Key("z".to_owned()); 65]);
    refuse(&deep, "nested too deep");
}

#[test]
fn nothing_is_called_and_no_list_is_longer_than_what_is_in_it() {
    let folder = Temporary::new();
    fs::create_dir_all(folder.run()).unwrap();
    let open = |index: &[u8]| {
        fs::write(folder.run().join(INDEX), index).unwrap();
        TorchFile::open(folder.run())
    };
    let mark = folder.path().join("called");
    let command = format!("touch {}", mark.display());
    let call = [
        b"\x80\x02cos\nsystem\nX".as_slice(),
        &(command.len() as u32).to_le_bytes(),
        command.as_bytes(),
        b"\x85R.",
    ];
    assert!(refused(open(&call.concat())).contains("not one of torch.distributed.checkpoint"));
    assert!(!mark.exists());
    for index in [b"".as_slice(), b"x", b"\x80\x02N.", b"\x80\x02}.", b"\x80\x02]."] {
        refused(open(index));
    }
    // A place far beyond the others makes no list.
    let made = archive(&[2]);
    let mut far = entry("x", &[2], &[0], &[2], [0, made.len() as u64]);
    far.path.push(PathItem::Place(i64::MAX));
    written(&folder.run(), &[far], &[made]);
    let file = TorchFile::open(folder.run()).unwrap();
    let Some(Value::Dict(items)) = file.value().get("x") else { panic!("{:?}", file.value()) };
    assert_eq!(items[0].0, Value::Int(i64::MAX));
}

#[test]
fn limits_bound_a_folder() {
    let folder = Temporary::new();
    let (value, storages) = small(0);
    save(&folder.run(), &value, &storages).unwrap();
    let limited = |limits: Limits| refused(TorchFile::open_with(folder.run(), &limits));
    let default = Limits::default;
    let index = fs::metadata(folder.run().join(INDEX)).unwrap().len();
    let small = limited(Limits { max_pickle_bytes: index - 1, ..default() });
    assert!(small.contains("bytes in its index"), "{small}");
    let few = Limits { max_values: 100, max_tensors: 1, ..default() };
    assert!(limited(few).contains("128 values"));
    assert!(limited(Limits { max_tensors: 3, ..default() }).contains("more than 3"));
    assert!(limited(Limits { max_depth: 1, ..default() }).contains("not one of"));
    assert!(limited(Limits { max_records: 0, ..default() }).contains("0 files"));
}

/// Opens a folder of more files than a process may open, in a process of its own that may open few.
#[cfg(target_os = "linux")]
#[test]
fn too_many_files_are_an_error_that_says_what_to_do() {
    const FOLDER: &str = "TORCH_FILES_FOLDER_OF_MANY";
    if let Some(folder) = std::env::var_os(FOLDER) {
        println!("{}", TorchFile::open(folder).unwrap_err());
        return;
    }
    let folder = Temporary::new();
    let made = archive(&[1]);
    let named = |at: i64| Entry {
        file: format!("__{at}_0.distcp"),
        ..entry("x", &[200], &[at], &[1], [0, made.len() as u64])
    };
    let entries: Vec<_> = (0..200).map(named).collect();
    written(&folder.run(), &entries, &[]);
    entries.iter().for_each(|entry| fs::write(folder.run().join(&entry.file), &made).unwrap());
    assert_eq!(TorchFile::open(folder.run()).unwrap().tensors().len(), 1);
    let test = "distributed::tests::hostile::too_many_files_are_an_error_that_says_what_to_do";
    let mut command = std::process::Command::new("sh");
    command
        .args(["-c", "ulimit -n 100 && exec \"$0\" \"$@\""])
        .arg(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(FOLDER, folder.run());
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("has 200 files") && text.contains("ulimit -n"), "{text}");
}

/// A model of 8 billion parameters and its optimizer take as many pieces on 64 ranks.
#[test]
fn an_index_of_many_pieces_is_within_the_limits() {
    let piece = |at: i64| Entry {
        file: format!("__{}_0.distcp", at % 64),
        ..entry("x", &[60_000, 8], &[at, 0], &[1, 8], [at as u64 * 1000, 1000])
    };
    let entries: Vec<_> = (0..60_000).map(piece).collect();
    let index = pickle::write_index(&entries, &Limits::default()).unwrap();
    let (read, len) = pickle::read_index(&index, &Limits::default()).unwrap();
    assert_eq!(len, index.len());
    let Some(Value::Dict(items)) = read.get("storage_data") else { panic!("no places") };
    assert_eq!(items.len(), 60_000);
}

/// What all objects of a folder hold counts together.
#[test]
fn objects_share_the_limit_on_values() {
    let folder = Temporary::new();
    let list = Value::List(vec![Value::Int(1); 3000]);
    let value = dict(&[("a", list.clone()), ("b", list.clone()), ("c", list)]);
    save(&folder.run(), &value, &[]).unwrap();
    let opened = |max_values| {
        TorchFile::open_with(folder.run(), &Limits { max_values, ..Limits::default() })
    };
    assert!(opened(10_000).is_ok());
    assert!(refused(opened(7000)).contains("values"));
    let writer = |max_values| {
        let limits = Limits { max_values, ..Limits::default() };
        FolderWriter::<Vec<u8>>::new(&value, [], &limits).map(drop)
    };
    writer(10_000).unwrap();
    let error = writer(7000).unwrap_err();
    assert!(matches!(error, Error::Unwritable { .. }), "{error}");
    assert!(error.to_string().contains("more than 7000 values"), "{error}");
}

#[test]
fn damage_is_found_wherever_it_is() {
    let folder = Temporary::new();
    // Few entries, since each byte of them is damaged several times.
    let tensor = TensorRef::contiguous("0", Dtype::Float32, vec![2, 3]);
    let value =
        dict(&[("m", dict(&[("w", tensor.into()), ("e", dict(&[]))])), ("n", Value::Int(5))]);
    save(&folder.run(), &value, &[(0..24).collect()]).unwrap();
    let read = || {
        let file = TorchFile::open(folder.run())?;
        file.verify()?;
        Ok(dumped(&file))
    };
    let right: Result<String> = read();
    let right = right.unwrap();
    for name in [INDEX, "__0_0.distcp"] {
        let path = folder.run().join(name);
        let bytes = fs::read(&path).unwrap();
        let mut accepted = 0;
        for flip in [0x01, 0xff] {
            for at in 0..bytes.len() {
                let mut damaged = bytes.clone();
                damaged[at] ^= flip;
                fs::write(&path, &damaged).unwrap();
                // Bytes that are not read may be damaged.
                if let Ok(found) = read() {
                    assert_eq!(found, right, "byte {at} of {name} by {flip}");
                    accepted += 1;
                }
            }
        }
        assert!(accepted < bytes.len() * 2, "{name}: {accepted}");
        assert!(name != INDEX || accepted == 0, "the index has a checksum: {accepted}");
        for len in (0..bytes.len()).step_by(3) {
            fs::write(&path, &bytes[..len]).unwrap();
            match read() {
                // Without its checksum the index is one of Python.
                Ok(found) => {
                    let rest = bytes.len() - len;
                    assert!(found == right && name == INDEX && rest <= 34, "cut to {len}");
                }
                Err(error) => assert!(matches!(error, Error::Malformed { .. }), "{error}"),
            }
        }
        fs::write(&path, &bytes).unwrap();
    }
}

/// The same in indexes without a checksum, as Python writes them.
#[test]
fn damaged_indexes_never_panic() {
    let folder = Temporary::new();
    let one = TensorRef::contiguous("0", Dtype::Float32, vec![2, 3]);
    let value = dict(&[("m", dict(&[("w", one.into()), ("e", dict(&[]))])), ("n", Value::Int(5))]);
    save(&folder.run(), &value, &[(0..24).collect()]).unwrap();
    let path = folder.run().join(INDEX);
    let bytes = fs::read(&path).unwrap();
    let pickle = &bytes[..bytes.len() - trailer(&[]).len()];
    assert_eq!(trailer(pickle), bytes[pickle.len()..]);
    let mut random = 1u64;
    for at in 0..pickle.len() {
        for _ in 0..3 {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let mut damaged = pickle.to_vec();
            damaged[at] = (random >> 56) as u8;
            fs::write(&path, &damaged).unwrap();
            if let Ok(file) = TorchFile::open(folder.run()) {
                for (_, tensor) in
                    file.tensors().into_iter().filter(|it| it.1.size_in_bytes() < 1 << 20)
                {
                    let mut bytes = vec![0; tensor.size_in_bytes() as usize];
                    file.read(tensor, &mut bytes).unwrap();
                }
            }
        }
    }
}
