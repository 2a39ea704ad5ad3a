//! Tests of checkpoints that several processes save together.

use super::replaced::{content, listed};
use super::*;
use crate::distributed::{INDEX, Share, SharedSave};
use crate::error::Error;
use crate::value::TensorRef;

/// A tensor of three bytes for each of these names, all in one dict under `m`.
fn tensors(names: &[&str]) -> (Value, Vec<Vec<u8>>) {
    let tensor = |at: usize| TensorRef::contiguous(at.to_string(), Dtype::Uint8, vec![3]).into();
    let items: Vec<_> = names.iter().enumerate().map(|(at, name)| (*name, tensor(at))).collect();
    let bytes = names.iter().map(|name| name.bytes().cycle().take(3).collect()).collect();
    (dict(&[("m", dict(&items)), ("step", Value::Int(7))]), bytes)
}

/// The share of a rank that saves these tensors; the first one saves the values as well.
fn share(save: &SharedSave, rank: u64, names: &[&str]) -> Result<Share> {
    let (value, storages) = tensors(names);
    let mut writer = FolderWriter::new(&value, storages, &Limits::default()).unwrap();
    writer.retain(|storage| storage.is_some() || rank == 0);
    let share = writer.save_share(save, rank)?;
    // As it is sent to the first rank.
    let sent = serde_json::to_string(&share).unwrap();
    Ok(serde_json::from_str(&sent).unwrap())
}

fn save_shared(folder: &Path, shares: &[&[&str]]) -> Result<()> {
    let save = SharedSave::begin(folder)?;
    let shares = shares.iter().zip(0..).map(|(names, rank)| share(&save, rank, names));
    let _durable = save.finish(shares.collect::<Result<Vec<_>>>()?, &Limits::default())?;
    Ok(())
}

#[test]
fn shares_are_read_as_one_checkpoint_and_replaced_as_one() {
    let (folder, whole) = (Temporary::new(), Temporary::new());
    let (value, storages) = tensors(&["a", "b", "c", "d"]);
    save(&whole.run(), &value, &storages).unwrap();
    // The second rank has nothing to save.
    save_shared(&folder.run(), &[&["c"], &[], &["a", "d"], &["b"]]).unwrap();
    let files = ["__0_0.distcp", "__2_0.distcp", "__3_0.distcp"];
    assert_eq!(listed(&folder.run()), [&[INDEX], &files[..]].concat());
    assert_eq!(content(&folder.run()), content(&whole.run()));
    // By fewer processes, whose files get a number that none has.
    save_shared(&folder.run(), &[&["b", "d"], &["a", "c"]]).unwrap();
    assert_eq!(listed(&folder.run()), [INDEX, "__0_1.distcp", "__1_1.distcp"]);
    assert_eq!(content(&folder.run()), content(&whole.run()));
    // By one alone.
    save(&folder.run(), &value, &storages).unwrap();
    assert_eq!(listed(&folder.run()), [INDEX, "__0_2.distcp"]);
    assert_eq!(content(&folder.run()), content(&whole.run()));
}

#[test]
fn nobody_reads_shares_without_an_index_and_the_old_checkpoint_stays() {
    let folder = Temporary::new();
    let begun = SharedSave::begin(folder.run()).unwrap();
    let first = share(&begun, 0, &["a"]).unwrap();
    let error = TorchFile::open(folder.run()).unwrap_err();
    assert!(error.to_string().contains("its save has not finished"), "{error}");
    let other = share(&begun, 1, &["b"]).unwrap();
    let _durable = begun.finish([first, other], &Limits::default()).unwrap();
    let before = content(&folder.run());
    let begun = SharedSave::begin(folder.run()).unwrap();
    share(&begun, 0, &["x"]).unwrap();
    share(&begun, 1, &["y"]).unwrap();
    assert_eq!(content(&folder.run()), before);
    begun.remove_share(1);
    begun.remove_share(0);
    begun.remove_folder();
    assert_eq!(listed(&folder.run()), [INDEX, "__0_0.distcp", "__1_0.distcp"]);
    assert_eq!(content(&folder.run()), before);
}

#[test]
fn what_is_no_whole_gets_no_index() {
    let folder = Temporary::new();
    let error = save_shared(&folder.run(), &[&["a", "b"], &["b"]]).unwrap_err();
    assert!(error.to_string().contains("m.b"), "{error}");
    assert!(error.to_string().contains("two processes have saved it"), "{error}");
    for is_short in [false, true] {
        let begun = SharedSave::begin(folder.run()).unwrap();
        let shares = [share(&begun, 0, &["a"]).unwrap(), share(&begun, 1, &["b"]).unwrap()];
        let file = fs::read_dir(folder.run()).unwrap().map(|entry| entry.unwrap().path());
        let file = file.filter(|path| path.to_str().unwrap().contains("__1_")).max().unwrap();
        match is_short {
            true => fs::File::options().write(true).open(&file).unwrap().set_len(9).unwrap(),
            false => fs::remove_file(&file).unwrap(),
        }
        let error = begun.finish(shares, &Limits::default()).unwrap_err();
        assert!(matches!(error, Error::Io { .. }), "{error}");
        assert!(error.to_string().contains("find what another process has saved"), "{error}");
        assert!(TorchFile::open(folder.run()).is_err());
    }
    // A folder that was made for it goes with what is in it.
    fs::remove_dir_all(folder.run()).unwrap();
    let begun = SharedSave::begin(folder.run()).unwrap();
    share(&begun, 0, &["a"]).unwrap();
    begun.remove_folder();
    assert!(folder.run().exists());
    begun.remove_share(0);
    begun.remove_folder();
    assert!(!folder.run().exists());
}

#[test]
fn a_save_takes_a_number_that_no_process_has_or_still_writes() {
    let folder = Temporary::new();
    save_shared(&folder.run(), &[&["a"], &["b"]]).unwrap();
    for (name, number) in [("__7_4.distcp", 5), (".__1_9.distcp.12-3.tmp", 10)] {
        fs::write(folder.run().join(name), "").unwrap();
        assert_eq!(SharedSave::begin(folder.run()).unwrap().number(), number);
    }
}

#[test]
fn shares_that_are_together_too_many_get_no_index() {
    let folder = Temporary::new();
    let begun = SharedSave::begin(folder.run()).unwrap();
    let shares = [share(&begun, 0, &["a", "b"]), share(&begun, 1, &["c", "d"])].map(Result::unwrap);
    // Four tensors and the step.
    let limits = |max_tensors| Limits { max_tensors, ..Limits::default() };
    let error = begun.finish(shares.clone(), &limits(4)).unwrap_err();
    assert!(error.to_string().contains("more than 4 tensors and values"), "{error}");
    assert!(TorchFile::open(folder.run()).is_err());
    let _durable = begun.finish(shares, &limits(5)).unwrap();
    assert!(TorchFile::open_with(folder.run(), &limits(5)).is_ok());
}

/// Each rank of a sharded optimizer has the state of its own parameters, or none.
#[test]
fn a_dict_that_is_empty_in_one_share_alone_is_none() {
    let (one, other) = (Temporary::new(), Temporary::new());
    let limits = Limits::default();
    for (folder, names) in [(&one, &["a"][..]), (&other, &[])] {
        let begun = SharedSave::begin(folder.run()).unwrap();
        let (empty, _) = tensors(&[]);
        let first = FolderWriter::<Vec<u8>>::new(&empty, [], &limits).unwrap();
        let shares = [first.save_share(&begun, 0).unwrap(), share(&begun, 1, names).unwrap()];
        let _durable = begun.finish(shares, &limits).unwrap();
    }
    assert_eq!(content(&one.run()), "{m:{a:<torch.uint8[3]616161>;};step:7;}");
    assert_eq!(content(&other.run()), "{m:{};step:7;}");
}
