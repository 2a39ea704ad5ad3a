//! numpy's arrays and numbers, in pickles alone, as detectron2 has them, and in files of `torch.save`.

use tch::Kind;
use tch_amp::checkpoint::{Checkpoint, CheckpointError, Restored};

use crate::checkpoint::{
    assert_has_pythons_weights, checkpoint_error, damaged, from_python, linear,
};
use testkit::checkpoints::reloaded;
use testkit::files::Folder;

const KINDS: [(&str, Kind); 10] = [
    ("f4", Kind::Float),
    ("f8", Kind::Double),
    ("f2", Kind::Half),
    ("i8", Kind::Int64),
    ("i4", Kind::Int),
    ("i2", Kind::Int16),
    ("i1", Kind::Int8),
    ("u1", Kind::Uint8),
    ("b1", Kind::Bool),
    ("c8", Kind::ComplexFloat),
];

fn check(file: &str, checkpoint: &Checkpoint, content: &serde_json::Value) {
    let others = ["zeros", "single", "fortran"].map(|name| (name, Kind::Float));
    for (name, kind) in KINDS.into_iter().chain(others) {
        let tensor = checkpoint.tensor(&format!("arrays.{name}")).unwrap();
        assert_eq!(tensor.kind(), kind, "{name} of {file}");
        let wanted: Vec<f64> = serde_json::from_value(content[name].clone()).unwrap();
        let real = if kind == Kind::ComplexFloat { tensor.view_as_real() } else { tensor };
        assert_eq!(testkit::to_f64(&real), wanted, "{name} of {file}");
    }
    assert_eq!(checkpoint.tensor("arrays.empty").unwrap().size(), [0, 3]);
    assert_eq!(checkpoint.tensor("arrays.single").unwrap().size(), [0; 0]);
    let vs = linear();
    let restored = checkpoint.restore().add("model", &vs).apply().unwrap();
    assert_eq!(restored, Restored::default(), "{file}");
    assert_has_pythons_weights(&vs, file);
}

#[test]
fn arrays_and_numbers_are_read_from_every_protocol() {
    let Some((folder, printed)) = from_python("checkpoint_files.py", "arrays") else { return };
    let content = serde_json::from_str(&printed).unwrap();
    for protocol in 2..=5 {
        for ending in ["pkl", "pt", "old.pt"] {
            let file = format!("{protocol}.{ending}");
            let checkpoint = Checkpoint::load(folder.file(&file))
                .unwrap_or_else(|error| panic!("{file}: {error}"));
            check(&file, &checkpoint, &content);
            let number = |name: &str| checkpoint.value::<f64>(&format!("numbers.{name}")).unwrap();
            let numbers = ["lr", "step", "f4", "f2", "u1"].map(number);
            assert_eq!(numbers, [0.1, -2.0, 0.5, -1.5, 255.0], "{file}");
            assert!(checkpoint.value::<bool>("numbers.flag").unwrap());
            assert_eq!(checkpoint.value::<String>("__author__").unwrap(), "x");
            for again in ["again.pt", "again.safetensors"] {
                check(again, &reloaded(&checkpoint, again), &content);
            }
        }
    }
    a_tensor_in_a_plain_pickle_says_so(&folder);
    let random = Checkpoint::load(folder.file("random_states_0.pkl")).unwrap();
    assert_eq!(random.tensor("torch_manual_seed").unwrap().kind(), Kind::Uint8);
    damaged(Checkpoint::load(folder.file("arrays.npz")));
    damage_is_an_error_or_other_numbers(&folder);
}

fn a_tensor_in_a_plain_pickle_says_so(folder: &Folder) {
    let refused = Checkpoint::load(folder.file("tensors.pkl")).unwrap();
    match checkpoint_error(refused.restore().add("model", &linear()).apply()) {
        CheckpointError::OtherPart { found, .. } => {
            assert!(found.contains("`torch.save`"), "{found}")
        }
        other => panic!("{other:?}"),
    }
}

/// A pickle alone has no checksums, but no damage makes it panic, and none reaches out of the file.
fn damage_is_an_error_or_other_numbers(folder: &Folder) {
    for file in ["2.pkl", "5.pkl"] {
        let bytes = std::fs::read(folder.file(file)).unwrap();
        for len in 0..bytes.len() {
            let refused = Checkpoint::from_bytes(bytes[..len].to_vec());
            assert!(refused.is_err(), "{file} of {len} bytes");
        }
        let longer = [&bytes[..], b"."].concat();
        assert!(Checkpoint::from_bytes(longer).is_err());
        let vs = linear();
        for at in 0..bytes.len() {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1 << (at % 8);
            let Ok(checkpoint) = Checkpoint::from_bytes(bytes) else { continue };
            drop(checkpoint.restore().add("model", &vs).apply());
            for name in ["f8", "c8", "fortran"] {
                drop(checkpoint.tensor(&format!("arrays.{name}")));
            }
        }
    }
}

/// Python 2 has strings for bytes, such as in the files of Caffe2.
#[test]
fn arrays_of_python_2_are_read() {
    for numbers in [[0.0f32, 0.0], [-1.5, 3e20]] {
        let content = numbers.map(f32::to_le_bytes).concat();
        let pickle: [&[u8]; 12] = [
            b"\x80\x02}U\x05blobs}U\x06weight",
            b"cnumpy.core.multiarray\n_reconstruct\n",
            b"cnumpy\nndarray\n",
            b"K\x00\x85U\x01b\x87R(K\x01K\x02\x85",
            b"cnumpy\ndtype\n",
            b"U\x02f4K\x00K\x01\x87R(K\x03U\x01<NNN",
            b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb",
            b"\x89U\x08",
            &content,
            b"tb",
            b"ss",
            b".",
        ];
        let checkpoint = Checkpoint::from_bytes(pickle.concat()).unwrap();
        let tensor = checkpoint.tensor("blobs.weight").unwrap();
        assert_eq!(Vec::<f32>::try_from(tensor).unwrap(), numbers);
    }
}

/// A text that no bytes can be made of is read once, and not at each of 100,000 uses, which would take hours.
#[test]
fn a_text_that_is_used_again_and_again_is_read_once() {
    let mut pickle = b"\x80\x02c_codecs\nencode\nq\x000X".to_vec();
    let mut text = "a".repeat(1 << 20);
    text.push('\u{100}');
    pickle.extend(u32::try_from(text.len()).unwrap().to_le_bytes());
    pickle.extend(text.as_bytes());
    pickle.extend(b"q\x010X\x06\x00\x00\x00latin1q\x020}X\x04\x00\x00\x00usesq\x03](");
    for _ in 0..100_000 {
        pickle.extend(b"h\x00h\x01h\x02\x86R");
    }
    pickle.extend(b"es.");
    assert!(Checkpoint::from_bytes(pickle).unwrap().contains("uses"));
}
