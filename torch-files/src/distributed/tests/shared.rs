//! Tests of checkpoints that several processes save together.

use super::replaced::{content, listed};
use super::*;
use crate::distributed::Share;
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
fn share(kind: FolderKind, save: &SharedSave, rank: u64, names: &[&str]) -> Result<Share> {
    let (value, storages) = tensors(names);
    let share = match kind {
        FolderKind::Distcp => {
            let mut writer = FolderWriter::new(&value, storages, &Limits::default()).unwrap();
            writer.retain(|storage| storage.is_some() || rank == 0);
            writer.save_share(save, rank)?
        }
        FolderKind::Safetensors => {
            let step = (rank == 0).then(|| ("step".to_owned(), "7".to_owned()));
            let tensor = |(name, bytes): (&&str, Vec<u8>)| {
                (format!("m.{name}"), Dtype::Uint8, vec![3], bytes)
            };
            let tensors = names.iter().zip(storages).map(tensor);
            let metadata = step.into_iter().collect();
            ShardWriter::new(tensors, metadata, &Limits::default())
                .unwrap()
                .save_share(save, rank)?
        }
    };
    // As it is sent to the first rank.
    let sent = serde_json::to_string(&share).unwrap();
    Ok(serde_json::from_str(&sent).unwrap())
}

fn save_shared(kind: FolderKind, folder: &Path, shares: &[&[&str]]) -> Result<()> {
    let save = SharedSave::begin(folder, kind)?;
    let shares = shares.iter().zip(0..).map(|(names, rank)| share(kind, &save, rank, names));
    let _durable = save.finish(shares.collect::<Result<Vec<_>>>()?, &Limits::default())?;
    Ok(())
}

#[test]
fn shares_are_read_as_one_checkpoint_and_replaced_as_one() {
    for kind in FolderKind::ALL {
        let (folder, whole) = (Temporary::new(), Temporary::new());
        save_shared(kind, &whole.run(), &[&["a", "b", "c", "d"]]).unwrap();
        // The second rank has nothing to save.
        save_shared(kind, &folder.run(), &[&["c"], &[], &["a", "d"], &["b"]]).unwrap();
        let files = [0, 2, 3].map(|rank| file_of(kind, rank, 0));
        let all: Vec<_> = [kind.index().to_owned()].into_iter().chain(files).collect();
        assert_eq!(listed(&folder.run()), all);
        assert_eq!(content(&folder.run()), content(&whole.run()));
        // By fewer processes, whose files get a number that none has.
        save_shared(kind, &folder.run(), &[&["b", "d"], &["a", "c"]]).unwrap();
        assert_eq!(
            listed(&folder.run()),
            [kind.index(), &file_of(kind, 0, 1), &file_of(kind, 1, 1)]
        );
        assert_eq!(content(&folder.run()), content(&whole.run()));
        // By one alone.
        save_shared(kind, &folder.run(), &[&["a", "b", "c", "d"]]).unwrap();
        assert_eq!(listed(&folder.run()), [kind.index(), &file_of(kind, 0, 2)]);
        assert_eq!(content(&folder.run()), content(&whole.run()));
    }
}

#[test]
fn nobody_reads_shares_without_an_index_and_the_old_checkpoint_stays() {
    for kind in FolderKind::ALL {
        let folder = Temporary::new();
        let begun = SharedSave::begin(folder.run(), kind).unwrap();
        let first = share(kind, &begun, 0, &["a"]).unwrap();
        let error = TorchFile::open(folder.run()).unwrap_err();
        assert!(error.to_string().contains("its save has not finished"), "{error}");
        let other = share(kind, &begun, 1, &["b"]).unwrap();
        let _durable = begun.finish([first, other], &Limits::default()).unwrap();
        let before = content(&folder.run());
        let begun = SharedSave::begin(folder.run(), kind).unwrap();
        share(kind, &begun, 0, &["x"]).unwrap();
        share(kind, &begun, 1, &["y"]).unwrap();
        assert_eq!(content(&folder.run()), before);
        begun.remove_share(1);
        begun.remove_share(0);
        begun.remove_folder();
        assert_eq!(
            listed(&folder.run()),
            [kind.index(), &file_of(kind, 0, 0), &file_of(kind, 1, 0)]
        );
        assert_eq!(content(&folder.run()), before);
    }
}

#[test]
fn what_is_no_whole_gets_no_index() {
    for kind in FolderKind::ALL {
        let folder = Temporary::new();
        let error = save_shared(kind, &folder.run(), &[&["a", "b"], &["b"]]).unwrap_err();
        assert!(error.to_string().contains("m.b"), "{error}");
        assert!(error.to_string().contains("two processes have saved it"), "{error}");
        for is_short in [false, true] {
            let begun = SharedSave::begin(folder.run(), kind).unwrap();
            let shares =
                [share(kind, &begun, 0, &["a"]).unwrap(), share(kind, &begun, 1, &["b"]).unwrap()];
            let file = begun.file_of(1);
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
        let begun = SharedSave::begin(folder.run(), kind).unwrap();
        share(kind, &begun, 0, &["a"]).unwrap();
        begun.remove_folder();
        assert!(folder.run().exists());
        begun.remove_share(0);
        begun.remove_folder();
        assert!(!folder.run().exists());
    }
}

#[test]
fn a_save_takes_a_number_that_no_process_has_or_still_writes() {
    for kind in FolderKind::ALL {
        let folder = Temporary::new();
        save_shared(kind, &folder.run(), &[&["a"], &["b"]]).unwrap();
        let temporary = format!(".{}.12-3.tmp", file_of(kind, 1, 9));
        for (name, number) in [(file_of(kind, 7, 4), 5), (temporary, 10)] {
            fs::write(folder.run().join(name), "").unwrap();
            let next = SharedSave::begin(folder.run(), kind).unwrap().number();
            assert_eq!(next, kind.first_number() + number);
        }
    }
}

#[test]
fn shares_that_are_together_too_many_get_no_index() {
    for kind in FolderKind::ALL {
        let folder = Temporary::new();
        let begun = SharedSave::begin(folder.run(), kind).unwrap();
        let shares = [share(kind, &begun, 0, &["a", "b"]), share(kind, &begun, 1, &["c", "d"])]
            .map(Result::unwrap);
        // Four tensors and, as an entry of its own, the step.
        let most = if kind == FolderKind::Distcp { 5 } else { 4 };
        let limits = |max_tensors| Limits { max_tensors, ..Limits::default() };
        let error = begun.finish(shares.clone(), &limits(most - 1)).unwrap_err();
        assert!(error.to_string().contains(&format!("more than {} tensors", most - 1)), "{error}");
        assert!(TorchFile::open(folder.run()).is_err());
        let _durable = begun.finish(shares, &limits(most)).unwrap();
        assert!(TorchFile::open_with(folder.run(), &limits(most)).is_ok());
    }
}

/// Each rank of a sharded optimizer has the state of its own parameters, or none.
#[test]
fn a_dict_that_is_empty_in_one_share_alone_is_none() {
    let kind = FolderKind::Distcp;
    let (one, other) = (Temporary::new(), Temporary::new());
    let limits = Limits::default();
    for (folder, names) in [(&one, &["a"][..]), (&other, &[])] {
        let begun = SharedSave::begin(folder.run(), kind).unwrap();
        let (empty, _) = tensors(&[]);
        let first = FolderWriter::<Vec<u8>>::new(&empty, [], &limits).unwrap();
        let shares = [first.save_share(&begun, 0).unwrap(), share(kind, &begun, 1, names).unwrap()];
        let _durable = begun.finish(shares, &limits).unwrap();
    }
    assert_eq!(content(&one.run()), "{m:{a:<torch.uint8[3]616161>;};step:7;}");
    assert_eq!(content(&other.run()), "{m:{};step:7;}");
}
