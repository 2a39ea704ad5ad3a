//! Tests that malicious pickles are refused.

use super::*;

/// Makes a tensor in the storage 0, with the given arguments after the storage.
fn with_tensor(args: &[u8]) -> Vec<u8> {
    with_pickle(&pickled(&[STORAGE, args]))
}

/// The start of a tensor, up to its storage of four floats.
const STORAGE: &[u8] =
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x04tQ";
/// The end of a tensor's arguments: `requires_grad` is false, and there are no hooks.
const REST: &[u8] = b"\x89ccollections\nOrderedDict\n)RtR";

/// Offset, sizes and strides.
type Layout<'a> = (&'a [u8], &'a [u8], &'a [u8]);

fn with_layout(offset: &[u8], size: &[u8], stride: &[u8]) -> Vec<u8> {
    with_tensor(&[offset, size, stride, REST].concat())
}

fn refused_pickle(bytes: &[u8]) -> String {
    refused(&with_pickle(&pickled(&[bytes])))
}

#[test]
fn the_same_with_nothing_wrong_is_read() {
    let fine = with_layout(b"K\x01", b"K\x03\x85", b"K\x01\x85");
    assert_eq!(opened(&fine).unwrap().root, Value::from(tensor("0", 1, &[3], &[1])));
}

#[test]
fn nothing_is_called() {
    let calls: [(&[u8], &str); 9] = [
        (b"cos\nsystem\nX\x02\0\0\0ls\x85R", "os.system"),
        (b"cposix\nsystem\nX\x02\0\0\0ls\x85R", "posix.system"),
        (b"c__builtin__\neval\nX\x01\0\0\0x\x85R", "__builtin__.eval"),
        (b"cbuiltins\ngetattr\n", "builtins.getattr"),
        (
            b"cbuiltins\ngetattr\nX\x02\0\0\0osX\x06\0\0\0system\x86RX\x02\0\0\0ls\x85R",
            "builtins.getattr",
        ),
        (b"\x8c\x02os\x8c\x06system\x93", "os.system"),
        (b"ctorch\nload\n", "torch.load"),
        (b"cfractions\nFraction\n)\x81}b", "fractions.Fraction"),
        (b"ccollections\ndefaultdict\n)R(K\x01K\x02u", "collections.defaultdict"),
    ];
    for (bytes, name) in calls {
        let opened = opened(&with_pickle(&pickled(&[bytes]))).unwrap();
        assert_eq!(opened.root, Value::Opaque(name.into()));
    }
}

#[test]
fn what_is_not_known_stands_for_itself() {
    let opaque = |what: &'static str| Value::Opaque(what.into());
    let other: [(&[u8], Value); 17] = [
        (b"ctorch\nuint16\n", text("torch.uint16")),
        (b"c__builtin__\nset\n](K\x01e\x85R", opaque("a set")),
        (b"c_codecs\nencode\nX\x01\0\0\0xX\x06\0\0\0latin1\x86R}b", opaque("bytes")),
        (
            b"ccollections\nCounter\n}K\x01K\x02s\x85R",
            Value::Dict(vec![(Value::Int(1), Value::Int(2))]),
        ),
        (b"ccollections\nCounter\n)R", Value::Dict(Vec::new())),
        (b"\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\x00", Value::Uint(u64::MAX)),
        (b"\x8a\x09\0\0\0\0\0\0\0\0\x01", opaque("an integer of more than 64 bits")),
        (
            b"\x8a\x12\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x01",
            opaque("an integer of more than 64 bits"),
        ),
        (b"\x8b\x02\0\0\0\x01\x01", Value::Int(257)),
        (b"X\x02\0\0\0\xed\xa0", opaque("a string that is not UTF-8")),
        (b"U\x01aU\x01b\x86", Value::Tuple(vec![text("a"), text("b")])),
        (b"C\x01a", opaque("bytes")),
        (b"\x8e\x01\0\0\0\0\0\0\0a", opaque("bytes")),
        (b"\x96\x01\0\0\0\0\0\0\0a", opaque("a bytearray")),
        (b"\x8f(K\x01\x90", opaque("a set")),
        (b"(K\x01\x91", opaque("a frozenset")),
        (b"NK\x010", Value::None),
    ];
    for (bytes, expected) in other {
        let opened = opened(&with_pickle(&pickled(&[bytes]))).unwrap();
        assert_eq!(opened.root, expected);
    }
}

#[test]
fn long_names_are_not_compared() {
    let name = [b"X".as_slice(), &600u32.to_le_bytes(), &[b'x'; 600]].concat();
    let twice = [&name[..], &name, b"\x93"].concat();
    let lines = [b"c__torch__.".as_slice(), &[b'x'; 600], b"\nx\n"].concat();
    for bytes in [twice, lines] {
        let opened = opened(&with_pickle(&pickled(&[&bytes]))).unwrap();
        assert_eq!(opened.root, Value::Opaque("an object of a class with a long name".into()));
    }
    assert!(refused_pickle(b"K\x01K\x02\x93").contains("not a string"));
}

#[test]
fn a_hostile_name_is_shown_as_it_is_harmless() {
    let name = [b"c\x1b[2J".as_slice(), &b"x".repeat(400), b"\ny\n"].concat();
    let Value::Opaque(what) = opened(&with_pickle(&pickled(&[&name]))).unwrap().root else {
        panic!("another value");
    };
    assert!(what.len() < 400 && !what.contains('\x1b'), "{what}");
}

#[test]
fn other_opcodes_are_refused() {
    // INST, OBJ, EXT1, EXT2, EXT4, LONG, INT, FLOAT, STRING, UNICODE, PERSID, DICT, LIST, DUP, GET, PUT, NEXT_BUFFER,
    // READONLY_BUFFER, a second PROTO.
    let opcodes = b"io\x82\x83\x84LIFSVPdl2gp\x97\x98\x80";
    for &opcode in opcodes {
        let error = refused_pickle(&[b'N', opcode, 1, 0, 0, 0]);
        assert!(error.contains(&format!("the opcode {opcode:#04x}")), "{error}");
    }
}

#[test]
fn calls_that_make_no_sense_are_refused() {
    let wrong: [(&[u8], &str); 13] = [
        (b"N)R", "what is not a function"),
        (b"ccollections\nOrderedDict\nNR", "what is not a function"),
        (b"ccollections\nOrderedDict\nN\x85R", "arguments"),
        (b"ctorch\nFloatStorage\n)R", "arguments"),
        (b"ccollections\nOrderedDict\n]NaR", "what is not a function"),
        (b"ccollections\nOrderedDict\n]]Naa\x85R", "arguments"),
        (b"ccollections\nOrderedDict\n)\x81", "what is not a class"),
        (b"N(K\x01\x90", "what is not a set"),
        (b"}}b", "what has none"),
        (b"NN}b", "what has none"),
        (b"c__torch__\nModule\n)\x81}K\x01Nsb", "attribute without a name"),
        (b"NQ", "persistent id"),
        (b"(X\x06\0\0\0modulectorch\nFloatStorage\nX\x01\0\0\x000NK\x04tQ", "persistent id"),
    ];
    for (bytes, expected) in wrong {
        let error = refused_pickle(bytes);
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn the_stack_cannot_be_misused() {
    let wrong: [(&[u8], &str); 12] = [
        (b"", "where there is none"),
        (b"NN", "more than one value"),
        (b"(N", "more than one value"),
        (b"t", "takes a mark"),
        (b"N(\x85", "where there is none"),
        (b"h\x07", "recalls 7"),
        (b"j\xff\xff\xff\xff", "recalls 4294967295"),
        (b"q\x00", "where there is none"),
        (b"Na", "where there is none"),
        (b"NNa", "what is not a list"),
        (b"NNNs", "what is not a dict"),
        (b"}(Nu", "a key without a value"),
    ];
    for (bytes, expected) in wrong {
        let error = refused_pickle(bytes);
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn lengths_and_numbers_are_checked() {
    let wrong: [(&[u8], &str); 8] = [
        (b"X\xff\xff\xff\xff", "within an opcode"),
        (b"\x8b\xff\xff\xff\xff", "within an opcode"),
        (b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff", "within an opcode"),
        (b"\x8e\xff\xff\xff\xff\xff\xff\xff\xff", "within an opcode"),
        (b"\x8c\x09abc", "within an opcode"),
        (b"\x8a\xff", "within an opcode"),
        (b"\x95\xff\xff\xff\xff\xff\xff\xff\xffN", "longer than the rest"),
        (b"ctorch", "within an opcode"),
    ];
    for (bytes, expected) in wrong {
        let error = refused_pickle(bytes);
        assert!(error.contains(expected), "{error}");
    }
    for bytes in
        [b"".as_slice(), b"\x80", b"\x80\x01N.", b"\x80\x06N.", b"N.", b"\x80\x02N", b"\x80\x02N.N"]
    {
        let error = refused(&with_pickle(bytes));
        assert!(error.contains("pickle"), "{error}");
    }
}

#[test]
fn dicts_with_a_key_twice_are_refused() {
    for bytes in
        [b"}(K\x01NK\x01Nu".as_slice(), b"}(K\x01N\x88Nu", b"}(K\x01NG\x3f\xf0\0\0\0\0\0\0Nu"]
    {
        assert!(refused_pickle(bytes).contains("twice"));
    }
    // Keys that a checkpoint cannot hold are not compared.
    let odd = opened(&with_pickle(&pickled(&[b"}(]N]Nu"]))).unwrap().root;
    assert_eq!(odd, Value::Dict(vec![(Value::List(vec![]), Value::None); 2]));
    assert!(
        refused_pickle(b"c__torch__\nModule\n)\x81}(X\x03\0\0\0a.bNX\x03\0\0\0a|bNub")
            .contains("twice")
    );
}

#[test]
fn tensors_cannot_reach_out_of_their_storage() {
    let big = b"\x8a\x08\0\0\0\0\0\0\0\x40";
    let pair = [big.as_slice(), big, b"\x86"].concat();
    let wrong: [(Layout<'_>, &str); 11] = [
        ((b"K\x00", b"K\x05\x85", b"K\x01\x85"), "beyond the end"),
        ((b"K\x02", b"K\x03\x85", b"K\x01\x85"), "beyond the end"),
        ((b"K\x00", b"K\x02K\x02\x86", b"K\x03K\x01\x86"), "beyond the end"),
        ((b"K\x05", b"K\x00\x85", b"K\x01\x85"), "beyond the end"),
        ((b"K\x04", b")", b")"), "beyond the end"),
        ((b"J\xff\xff\xff\xff", b"K\x01\x85", b"K\x01\x85"), "not a count"),
        ((b"K\x00", b"J\xff\xff\xff\xff\x85", b"K\x01\x85"), "negative size or stride"),
        ((b"K\x03", b"K\x02\x85", b"J\xff\xff\xff\xff\x85"), "negative size or stride"),
        ((b"K\x00", &pair, b"K\x00K\x00\x86"), "more elements than a tensor"),
        ((b"K\x00", b"K\x02K\x02\x86", &pair), "beyond the end"),
        ((b"K\x00", b"K\x02\x85", b")"), "number of strides"),
    ];
    for ((offset, size, stride), expected) in wrong {
        let error = refused(&with_layout(offset, size, stride));
        assert!(error.contains(expected), "{error}");
    }
    let expanded = b"\x8a\x06\0\0\0\0\0\x01\x85";
    assert!(refused(&with_layout(b"K\x00", expanded, b"K\x00\x85")).contains("expanded tensors"));
    let dims = [b"(".as_slice(), &b"K\x01".repeat(65), b"t"].concat();
    assert!(refused(&with_layout(b"K\x00", &dims, &dims)).contains("at most 64"));
    assert!(refused(&with_layout(b"K\x00", b"N\x85", b"K\x01\x85")).contains("at most 64"));
}

#[test]
fn other_tensors_are_refused() {
    let args = b"K\x00K\x04\x85K\x01\x85";
    let hooks = b"\x89}K\x01Ns"; // Hooks.
    let conjugated = b"\x89}}X\x04\0\0\0conj\x88stR";
    for extras in [&[hooks.as_slice(), b"tR"].concat()[..], conjugated] {
        let opened = opened(&with_tensor(&[args, extras].concat())).unwrap();
        assert_eq!(
            opened.root,
            Value::Opaque("a tensor with hooks, or a conjugated or negated one".into())
        );
    }
    assert!(refused(&with_tensor(&[args, b"K\x01}tR".as_slice()].concat())).contains("not a bool"));
    assert!(refused(&with_tensor(b"tR")).contains("arguments"));
    // The same around a parameter and with a dtype beside the storage.
    let storage = &STORAGE[b"ctorch._utils\n_rebuild_tensor_v2\n(".len()..];
    let plain = [STORAGE, args, REST].concat();
    let hooked = b"}K\x01Ns".as_slice();
    let parameter =
        [b"ctorch._utils\n_rebuild_parameter\n".as_slice(), &plain, b"\x88", hooked, b"\x87R"];
    let start = b"ctorch._utils\n_rebuild_tensor_v3\n(".as_slice();
    let third = [start, storage, args, hooks, b"ctorch\nfloat32\n", b"tR"];
    let conjugated = [start, storage, args, b"\x89}", b"ctorch\nfloat32\n", hooked, b"tR"];
    for bytes in [&parameter[..], &third, &conjugated] {
        let opened = opened(&with_pickle(&pickled(bytes))).unwrap();
        assert!(matches!(opened.root, Value::Opaque(_)), "{:?}", opened.root);
    }
    let parameter = b"ctorch._utils\n_rebuild_parameter\nN\x88}\x87R";
    assert!(refused_pickle(parameter).contains("not a tensor"));
}

#[test]
fn storages_fit_their_records() {
    let storage = |key: &[u8], numel: &[u8]| {
        let id = [
            b"(X\x07\0\0\0storagectorch\nFloatStorage\n".as_slice(),
            key,
            b"X\x03\0\0\0cpu",
            numel,
            b"tQ",
        ];
        refused_pickle(&id.concat())
    };
    let key = b"X\x01\0\0\x000";
    assert!(storage(key, b"K\x03").contains("should have 12 bytes"));
    assert!(storage(key, b"\x8a\x08\0\0\0\0\0\0\0\x40").contains("more elements"));
    assert!(storage(key, b"J\xff\xff\xff\xff").contains("persistent id"));
    assert!(storage(b"X\x01\0\0\x001", b"K\x04").contains("no record"));
    assert!(
        storage(&[b"X\x41\0\0\0".as_slice(), &[b'0'; 65]].concat(), b"K\x04").contains("long key")
    );
    let twice = b"](X\x07\0\0\0storagectorch\nIntStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x04tQa";
    let one = with_layout(b"K\x00", b"K\x03\x85", b"K\x01\x85");
    assert!(opened(&one).is_ok());
    let two = pickled(&[b"(", twice, STORAGE, b"K\x00K\x03\x85K\x01\x85", REST, b"t"]);
    assert!(refused(&with_pickle(&two)).contains("two dtypes"));
}
