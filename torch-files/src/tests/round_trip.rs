//! Tests that values round-trip, and that the same values give the same bytes.

use super::*;
use crate::zip::is_zip;

fn everything() -> Value {
    let ints = [0, 1, -1, 255, 256, 65_535, 65_536, -129, i64::MAX, i64::MIN, 1 << 40];
    let floats = [0.0, -0.0, 1e-3, f64::INFINITY, f64::MIN_POSITIVE];
    Value::Dict(vec![
        (text("ints"), Value::List(ints.map(Value::Int).to_vec())),
        (text("floats"), Value::Tuple(floats.map(Value::Float).to_vec())),
        (text("flags"), Value::List(vec![Value::Bool(true), Value::Bool(false), Value::None])),
        (text("empty"), Value::Tuple(vec![Value::List(vec![]), Value::Tuple(vec![])])),
        (text("täst 🦀"), Value::Dict(vec![])),
        (Value::Int(3), text("")),
        (Value::None, text("none")),
        (Value::Bool(true), text("true")),
        (Value::Float(0.5), text("half")),
    ])
}

#[test]
fn values_come_back() {
    let bytes = saved(&everything(), &[]).unwrap();
    assert!(is_zip(&bytes));
    let opened = opened(&bytes).unwrap();
    assert_eq!(opened.root, everything());
    assert!(opened.storages.is_empty());
    let names: Vec<_> = opened.others.keys().map(String::as_str).collect();
    assert_eq!(names, ["byteorder", "data.pkl", "version"]);
    assert_eq!(bytes, saved(&everything(), &[]).unwrap(), "the same values make the same bytes");
}

#[test]
fn a_nan_keeps_its_payload() {
    let nan = f64::from_bits(0x7ff4_dead_beef_0001);
    let opened = opened(&saved(&Value::Float(nan), &[]).unwrap()).unwrap();
    let Value::Float(found) = opened.root else { panic!("{:?}", opened.root) };
    assert_eq!(found.to_bits(), nan.to_bits());
}

#[test]
fn tensors_of_all_kinds_come_back() {
    let keys: Vec<_> = (0..Dtype::ALL.len()).map(|key| key.to_string()).collect();
    let storages: Vec<_> = keys
        .iter()
        .zip(Dtype::ALL)
        .map(|(key, dtype)| (key.as_str(), vec![1; 6 * dtype.size()]))
        .collect();
    let tensors = keys
        .iter()
        .zip(Dtype::ALL)
        .map(|(key, dtype)| Value::from(TensorRef { dtype, ..tensor(key, 1, &[2, 2], &[1, 2]) }));
    let root = Value::List(tensors.collect());
    let bytes = saved(&root, &storages).unwrap();
    let opened = opened(&bytes).unwrap();
    assert_eq!(opened.root, root);
    for (key, data) in &storages {
        let record = &opened.storages[*key];
        assert_eq!(record.offset % 64, 0, "aligned");
        assert_eq!(record.crc32, crc32fast::hash(data));
        let start = usize::try_from(record.offset).unwrap();
        assert_eq!(bytes[start..][..data.len()], data[..]);
    }
}

#[test]
fn views_share_a_storage() {
    let root = Value::List(vec![
        Value::from(tensor("0", 0, &[3, 2], &[1, 3])),
        Value::from(tensor("0", 4, &[2], &[1])),
        Value::from(tensor("0", 5, &[], &[])),
        Value::from(tensor("0", 2, &[7, 3], &[0, 1])),
        Value::from(tensor("0", 6, &[0, 3], &[3, 1])),
        Value::from(TensorRef { requires_grad: true, ..tensor("1", 0, &[0], &[1]) }),
    ]);
    let bytes = saved(&root, &[("0", vec![7; 24]), ("1", vec![])]).unwrap();
    assert_eq!(opened(&bytes).unwrap().root, root);
}

#[test]
fn what_could_not_be_read_again_is_not_written() {
    let twice = Value::Dict(vec![(Value::Int(1), Value::None), (Value::Bool(true), Value::None)]);
    let odd_key = Value::Dict(vec![(Value::List(vec![]), Value::None)]);
    let deep = (0..65).fold(Value::None, |value, _| Value::List(vec![value]));
    let outside = Value::from(tensor("0", 1, &[4], &[1]));
    let unknown = Value::from(tensor("1", 0, &[4], &[1]));
    let grad = TensorRef { dtype: Dtype::Int32, requires_grad: true, ..tensor("0", 0, &[4], &[1]) };
    let two_kinds = Value::List(vec![
        Value::from(tensor("0", 0, &[4], &[1])),
        Value::from(TensorRef { dtype: Dtype::Int32, ..tensor("0", 0, &[4], &[1]) }),
    ]);
    let wrong = [twice, odd_key, deep, outside, unknown, Value::from(grad), two_kinds];
    for root in wrong {
        let error = saved(&root, &[("0", vec![0; 16])]).expect_err("refused");
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput, "{root:?}");
    }
    for keys in [["../0", "1"], ["0", "0"], ["", "1"]] {
        assert!(saved(&Value::None, &keys.map(|key| (key, vec![0; 4]))).is_err(), "{keys:?}");
    }
}

/// A file that has the most values that may be read is written, and one that has one more is not.
#[test]
fn what_is_written_is_counted_as_it_is_read() {
    let sizes = [("0".to_owned(), 48), ("1".to_owned(), 48)];
    let lengths = |key: &str| sizes.iter().find(|size| size.0 == key).map(|size| size.1);
    let double = |dtype| Value::from(TensorRef { dtype, ..tensor("1", 1, &[2, 1, 3], &[0, 2, 1]) });
    let map = Value::map(vec![("a".into(), Value::Uint(u64::MAX)), ("b".into(), everything())]);
    let roots = [
        everything(),
        map,
        Value::None,
        Value::Tuple(vec![double(Dtype::Float64), double(Dtype::Float64), text("x")]),
        Value::List(vec![double(Dtype::Float8E5m2), Value::from(tensor("0", 0, &[], &[]))]),
        Value::List(vec![Value::Dict(vec![]); 100]),
    ];
    for root in roots {
        let bytes = pickle::write(&root, &sizes, &Limits::default()).unwrap();
        let mut counts = [None; 2];
        for max_values in 0..2000 {
            let limits = Limits { max_values, ..Limits::default() };
            let fits = [
                pickle::write(&root, &sizes, &limits).is_ok(),
                pickle::read(&bytes, &lengths, &limits).is_ok(),
            ];
            for (count, fits) in counts.iter_mut().zip(fits) {
                *count = count.or_else(|| fits.then_some(max_values));
            }
        }
        let [written, read] = counts;
        assert!(written.is_some() && written == read, "{root:?}: {written:?} {read:?}");
    }
}

#[test]
fn a_storage_of_another_length_is_an_error() {
    for len in [3, 5] {
        let mut fill = |_: usize, out: &mut dyn Write| out.write_all(&vec![0; len]);
        let sizes = [("0".to_owned(), 4)];
        let result = save(Cursor::new(Vec::new()), &Value::None, &sizes, &mut fill);
        assert!(result.is_err());
    }
}

/// Accepts some bytes, and then fails.
struct Full(Cursor<Vec<u8>>, usize);

impl Write for Full {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.1 < bytes.len() {
            return Err(std::io::Error::from(std::io::ErrorKind::StorageFull));
        }
        self.1 -= bytes.len();
        self.0.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl std::io::Seek for Full {
    fn seek(&mut self, to: std::io::SeekFrom) -> std::io::Result<u64> {
        self.0.seek(to)
    }
}

#[test]
fn a_full_disk_is_an_error_wherever_it_comes() {
    let root = Value::from(tensor("0", 0, &[4], &[1]));
    let sizes = [("0".to_owned(), 16)];
    let mut fill = |_: usize, out: &mut dyn Write| out.write_all(&[0; 16]);
    // Each local header is written twice, the second time with the checksum.
    let enough = 2 * saved(&root, &[("0", vec![0; 16])]).unwrap().len();
    let mut save = |room| save(Full(Cursor::default(), room), &root, &sizes, &mut fill);
    assert!(save(enough).is_ok());
    let needed = (0..enough).find(|&room| save(room).is_ok()).unwrap();
    for room in 0..needed {
        let error = save(room).map(|_| ()).expect_err("full");
        assert_eq!(error.kind(), std::io::ErrorKind::StorageFull, "{room}");
    }
}

/// Makes a file like `VarStore::save`: a TorchScript module whose attributes have `|` instead of the dots in their
/// names.
#[test]
fn a_file_of_tch_is_a_dict() {
    let tensor_of = |name: &[u8], more: &[u8]| {
        let len = u32::try_from(name.len()).unwrap().to_le_bytes();
        let id: &[u8] =
            b"((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x04tQ";
        let layout: &[u8] = b"K\x00(K\x04t(K\x01t\x88ccollections\nOrderedDict\n)RtR";
        let function: &[u8] = b"ctorch._utils\n_rebuild_tensor_v2\n";
        [b"X", len.as_slice(), name, function, id, layout, more].concat()
    };
    let class = b"c__torch__\nModule\nq\x00)\x81";
    let inner = [class.as_slice(), b"}(", &tensor_of(b"a|b", b"ub")].concat();
    let attributes = [tensor_of(b"layer|one|bias", b""), tensor_of(b"t", b"")].concat();
    let bytes = pickled(&[class, b"}(", &attributes, b"X\x03\0\0\0x|y", &inner, b"ubq\x22"]);
    let records: [(&str, &[u8]); 5] = [
        ("vs/data/0", &[0; 16]),
        ("vs/data.pkl", &bytes),
        ("vs/code/__torch__.py", b"class Module(Module):"),
        ("vs/constants.pkl", b"\x80\x02)."),
        ("vs/byteorder", b"little"),
    ];
    let tensor = Value::from(TensorRef { requires_grad: true, ..tensor("0", 0, &[4], &[1]) });
    let inner = Value::Dict(vec![(text("a.b"), tensor.clone())]);
    let expected = [("layer.one.bias", tensor.clone()), ("t", tensor), ("x.y", inner)];
    let expected = expected.map(|(name, value)| (text(name), value));
    assert_eq!(opened(&archive(&records)).unwrap().root, Value::Dict(expected.to_vec()));
}

/// Reads files that other programs have written and saves them again, if the environment names any.
#[test]
fn named_files_are_read() {
    for path in std::env::var("TCH_AMP_TORCH_FILES").unwrap_or_default().split_whitespace() {
        let opened = opened(&std::fs::read(path).unwrap()).unwrap();
        println!("{path}: {:#?}", opened);
    }
}
