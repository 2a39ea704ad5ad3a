//! Tests that everything that a file can ask for is bounded.

use super::*;

fn limited(bytes: &[u8], limits: &Limits) -> String {
    open(Cursor::new(bytes), limits).expect_err("it is refused").to_string()
}

/// Nested lists, each of which contains the previous one ten times.
fn bomb(levels: u8) -> Vec<u8> {
    let mut parts: Vec<Vec<u8>> = vec![b"]q\x00".to_vec()];
    for level in 0..levels {
        let tenfold = [b'h', level].repeat(10);
        parts.push([b"](".as_slice(), &tenfold, b"eq", &[level + 1]].concat());
    }
    // A tuple of all lists, so that one value remains on the stack.
    let count = parts.len();
    parts.insert(0, b"(".to_vec());
    parts.push(b"t".to_vec());
    assert!(count < 60);
    pickled(&parts.iter().map(Vec::as_slice).collect::<Vec<_>>())
}

#[test]
fn values_that_multiply_are_refused() {
    assert!(opened(&with_pickle(&bomb(3))).is_ok());
    let limits = Limits { max_values: 100_000, ..Limits::default() };
    assert!(limited(&with_pickle(&bomb(40)), &limits).contains("more than 100000 values"));
}

#[test]
fn text_that_multiplies_is_refused() {
    let text = [b"X".as_slice(), &1000u32.to_le_bytes(), &[b'x'; 1000], b"q\x000"].concat();
    let text = &text[..text.len() - 1];
    let bytes = pickled(&[b"](", text, &b"h\x00".repeat(100), b"e"]);
    let limits = Limits { max_pickle_bytes: 50_000, ..Limits::default() };
    assert!(limited(&with_pickle(&bytes), &limits).contains("more than 50000 bytes of text"));
    assert!(opened(&with_pickle(&bytes)).is_ok());
    // However small the pickle is, the text must not exceed a multiple of it.
    let text =
        [b"X".as_slice(), &1_000_000u32.to_le_bytes(), &[b'x'; 1_000_000], b"q\x000"].concat();
    let text = &text[..text.len() - 1];
    let recalled =
        |times: usize| with_pickle(&pickled(&[b"](", text, &b"h\x00".repeat(times), b"e"]));
    assert!(opened(&recalled(15)).is_ok());
    assert!(refused(&recalled(18)).contains("bytes of text"));
}

/// The number of containers around what is in them.
fn depth(mut value: &Value) -> usize {
    let mut depth = 0;
    while let Value::List(items) | Value::Tuple(items) = value {
        depth += 1;
        let Some(inner) = items.first() else { break };
        value = inner;
    }
    depth
}

#[test]
fn depth_is_bounded() {
    let nested = |depth: usize| with_pickle(&pickled(&[b")", &b"\x85".repeat(depth - 1)]));
    assert_eq!(depth(&opened(&nested(64)).unwrap().root), 64);
    for levels in [65, 1_000_000] {
        assert_eq!(depth(&opened(&nested(levels)).unwrap().root), 64);
    }
    let marks = pickled(&[&b"(".repeat(900_000), &b"t".repeat(900_000)]);
    assert_eq!(depth(&opened(&with_pickle(&marks)).unwrap().root), 64);
    // Marks that are never removed, each of which would be kept until the end.
    let marks = refused(&with_pickle(&pickled(&[&b"(".repeat(3_000_000)])));
    assert!(marks.contains("more than 2000000 values"), "{marks}");
    let dicts = pickled(&[&b"}K\x00".repeat(100_000), b"N", &b"s".repeat(100_000)]);
    assert!(opened(&with_pickle(&dicts)).is_ok());
}

#[test]
fn what_contains_itself_ends() {
    let itself = || Value::Opaque("nested too deep, or contains itself".into());
    let cases: [(&[u8], Value); 4] = [
        (b"]q\x00h\x00a", Value::List(vec![itself()])),
        (b"}q\x00K\x01h\x00s", Value::Dict(vec![(Value::Int(1), itself())])),
        (b"]q\x00]h\x00aa", Value::List(vec![Value::List(vec![itself()])])),
        (b"]q\x00(h\x00h\x00e", Value::List(vec![itself(), itself()])),
    ];
    for (bytes, expected) in cases {
        assert_eq!(opened(&with_pickle(&pickled(&[bytes]))).unwrap().root, expected);
    }
}

#[test]
fn long_pickles_many_values_and_many_records_are_refused() {
    let bytes = with_pickle(&pickled(&[b"](", &b"N".repeat(100), b"e"]));
    let limits = Limits { max_pickle_bytes: 50, ..Limits::default() };
    assert!(limited(&bytes, &limits).contains("at most 50"));
    let limits = Limits { max_values: 50, ..Limits::default() };
    assert!(limited(&bytes, &limits).contains("more than 50 values"));
    let limits = Limits { max_records: 1, ..Limits::default() };
    assert!(limited(&bytes, &limits).contains("more than 1 records"));
}

#[test]
fn a_claim_of_many_records_is_refused_before_it_is_believed() {
    // A zip64 archive, written by hand because the zip crate writes one only for many records.
    let mut bytes = archive(&[("a/data.pkl", b"\x80\x02N.")]);
    let end = bytes.len() - 22;
    let mut tail = bytes.split_off(end);
    let central: [u8; 8] =
        [tail[12], tail[13], tail[14], tail[15], tail[16], tail[17], tail[18], tail[19]];
    let [size, offset] = [
        u64::from(u32::from_le_bytes(*central.first_chunk().unwrap())),
        u64::from(u32::from_le_bytes(*central.last_chunk().unwrap())),
    ];
    let count = 1u64 << 40;
    bytes.extend(b"PK\x06\x06\x2c\0\0\0\0\0\0\0\x2d\0\x2d\0\0\0\0\0\0\0\0\0");
    for field in [count, count, size, offset] {
        bytes.extend(field.to_le_bytes());
    }
    bytes.extend(b"PK\x06\x07\0\0\0\0");
    bytes.extend((end as u64).to_le_bytes());
    bytes.extend([1, 0, 0, 0]);
    tail[8..12].fill(0xff);
    bytes.extend(&tail);
    assert!(refused(&bytes).contains("more than 262144 records"));
    // The same file with the true count is accepted.
    for at in [end + 24, end + 32] {
        bytes[at..at + 8].copy_from_slice(&1u64.to_le_bytes());
    }
    assert_eq!(opened(&bytes).unwrap().root, Value::None);
    // The claim must be at the expected position.
    let locator = bytes.len() - 42;
    bytes[locator + 8] ^= 1;
    assert!(refused(&bytes).contains("zip64 end"));
}

#[test]
fn expanded_tensors_are_bounded_together() {
    let one = |elements: i64| Value::from(tensor("0", 0, &[elements], &[0]));
    let saved = |root: &Value| saved(root, &[("0", vec![0; 16])]).unwrap();
    assert!(opened(&saved(&one(1 << 20))).is_ok());
    assert!(refused(&saved(&one(1 << 40))).contains("bytes of expanded tensors"));
    let many = Value::List(vec![one(1 << 27); 3]);
    assert!(refused(&saved(&many)).contains("bytes of expanded tensors"));
}

/// The largest cost that the limits allow a file of 100 MB to cause.
#[test]
#[ignore = "slow"]
fn the_worst_files_are_bearable() {
    let with = |unit: &[u8], times: usize| {
        let body = unit.repeat(times);
        with_pickle(&pickled(&[b"](", &body, b"e"]))
    };
    println!("Value: {} bytes", size_of::<Value>());
    let status = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        status.lines().find(|line| line.starts_with("VmHWM")).unwrap_or_default().to_owned()
    };
    let memo: Vec<u8> =
        (0..9_000_000u32).flat_map(|at| [b"r".as_slice(), &at.to_le_bytes()].concat()).collect();
    let cases = [
        ("nones", with(b"N", 9_999_990)),
        ("lists", with(b"]", 9_999_990)),
        ("dicts", with(b"}NNs", 3_000_000)),
        ("short texts", with(b"X\x03\0\0\0abc", 9_000_000)),
        ("one-tuples", with(b"N\x85", 4_900_000)),
        ("memo", with_pickle(&pickled(&[b"N", &memo]))),
    ];
    for (name, bytes) in cases {
        let started = std::time::Instant::now();
        let result = opened(&bytes).map(drop).map_err(|error| error.to_string());
        println!("{name}: {result:?} {:?} {}", started.elapsed(), status());
    }
    let started = std::time::Instant::now();
    println!("{} {:?} {}", refused(&with_pickle(&bomb(40))), started.elapsed(), status());
}
