//! Errors of the disk at each system call of a save by two processes: the old checkpoint or the new one is there.

use std::collections::BTreeMap;
use std::io::{Seek, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use super::replaced::{content, listed};
use super::*;
use crate::atomic::Replaced;

/// A file that is opened right before the system calls under test.
const MARKER: &str = "MARKER";

/// The folder of a child of a test, and its kind.
const FOLDER: &str = "TORCH_FILES_FAULTS_FOLDER";
const KIND: &str = "TORCH_FILES_FAULTS_KIND";

/// A `?` marks calls that not every architecture has.
const CALLS: &str = "openat,write,lseek,fsync,getdents64,?statx,?rename,renameat,renameat2,?unlink,unlinkat,?mkdir,mkdirat";

/// Saves by two processes, as the ranks of a group do.
fn save_together(kind: FolderKind, folder: &Path, seed: u8) -> Result<Replaced> {
    let begun = SharedSave::begin(folder, kind)?;
    let share = |rank: u8| {
        let (name, bytes) = (format!("t{rank}"), vec![seed + rank; 5000]);
        let shape = vec![bytes.len() as i64];
        if kind == FolderKind::Distcp {
            let tensor = TensorRef::contiguous("0", Dtype::Uint8, shape);
            let value = dict(&[(&name, tensor.into())]);
            let writer = FolderWriter::new(&value, [bytes], &Limits::default())?;
            return writer.save_share(&begun, rank.into());
        }
        let tensor = (name, Dtype::Uint8, shape, bytes);
        let mut writer = ShardWriter::new([tensor], BTreeMap::new(), &Limits::default())?;
        writer.save_share(&begun, rank.into())
    };
    let shares = (0..2).map(share).collect::<Result<Vec<_>>>();
    let saved = shares.and_then(|shares| begun.finish(shares, &Limits::default()));
    saved.inspect_err(|_| {
        (0..2).for_each(|rank| begun.remove_share(rank));
        begun.remove_folder();
    })
}

/// Does nothing unless the test has started this process.
#[test]
fn as_a_child() {
    let Some(folder) = std::env::var_os(FOLDER).map(PathBuf::from) else { return };
    let kind = FolderKind::ALL[usize::from(std::env::var_os(KIND).unwrap() == "1")];
    // The numbers of the calls are higher than those of other threads then.
    for _ in 0..100 {
        let mut file = fs::OpenOptions::new().write(true).open("/dev/null").unwrap();
        file.write_all(b".").and_then(|()| file.rewind()).and_then(|()| file.metadata()).unwrap();
    }
    drop(fs::File::open(folder.join(MARKER)));
    std::process::exit(match save_together(kind, &folder, 7) {
        Ok(Replaced::Durable) => 0,
        Ok(Replaced::Uncertain { .. }) => 3,
        Err(_) => 5,
    })
}

/// Runs a child under strace, which may inject an error. Returns its exit code, and its calls that concern the folder:
/// the name and the number of each.
fn traced(
    kind: FolderKind,
    folder: &Path,
    inject: Option<&str>,
) -> (Option<i32>, Vec<(String, usize)>) {
    let log = Temporary::new();
    let mut command = Command::new("strace");
    command.args(["-f", "-y", "-e", &format!("trace={CALLS}")]);
    command.args(inject.map(|inject| format!("--inject={inject}")));
    command.arg("-o").arg(log.run()).arg(std::env::current_exe().unwrap());
    command.args(["--exact", "distributed::tests::faults::as_a_child", "--nocapture"]);
    command.arg("--test-threads=1").env(FOLDER, folder);
    command.env(KIND, if kind == FolderKind::Distcp { "0" } else { "1" });
    let code = command.output().unwrap().status.code();
    let (mut numbers, mut calls, mut is_after) = (BTreeMap::new(), Vec::new(), false);
    for line in fs::read_to_string(log.run()).unwrap().lines() {
        let Some((thread, call)) = line.split_once(' ') else { continue };
        let Some((name, _)) = call.trim_start().split_once('(') else { continue };
        let number = numbers.entry((thread.to_owned(), name.to_owned())).or_insert(0);
        *number += 1;
        if is_after && line.contains(folder.to_str().unwrap()) {
            calls.push((name.to_owned(), *number));
        }
        is_after |= line.contains(MARKER);
    }
    (code, calls)
}

/// The files that no index names.
fn strays(folder: &Path, kind: FolderKind) -> Vec<String> {
    let index = fs::read(folder.join(kind.index())).unwrap_or_default();
    let is_named = |name: &str| index.windows(name.len()).any(|part| part == name.as_bytes());
    listed(folder).into_iter().filter(|name| name != kind.index() && !is_named(name)).collect()
}

#[test]
fn an_error_of_any_system_call_leaves_a_complete_checkpoint() {
    let tried = Command::new("strace")
        .args(["-f", "-e", "inject=exit_group:signal=SIGKILL", "true"])
        .output();
    if !tried.is_ok_and(|output| output.status.signal() == Some(9)) {
        println!("skipped: strace does not work here");
        return;
    }
    let mut outcomes = BTreeMap::<_, usize>::new();
    for kind in FolderKind::ALL {
        let temporary = Temporary::new();
        let folder = fs::canonicalize(temporary.path()).unwrap().join("run");
        let _durable = save_together(kind, &folder, 7).unwrap();
        let new = content(&folder);
        let begin = || {
            fs::remove_dir_all(&folder).unwrap();
            let _durable = save_together(kind, &folder, 3).unwrap();
            content(&folder)
        };
        let old = begin();
        let (code, calls) = traced(kind, &folder, None);
        assert_eq!((code, content(&folder)), (Some(0), new.clone()));
        assert!(calls.len() > 20, "{calls:?}");
        for (name, number) in calls {
            for error in ["EIO", "ENOSPC", "EDQUOT", "EROFS"] {
                // What the others mean for a call is the same.
                if error != "EIO" && ["lseek", "statx", "getdents64"].contains(&name.as_str()) {
                    continue;
                }
                begin();
                let inject = format!("{name}:error={error}:when={number}");
                let (code, _) = traced(kind, &folder, Some(&inject));
                let context = format!("{kind:?} {inject}: {code:?}");
                let is_new = content(&folder) == new;
                assert!(is_new || content(&folder) == old, "{context}");
                assert_eq!(is_new, code != Some(5), "{context}");
                assert!(matches!(code, Some(0 | 3 | 5)), "{context}");
                // The old files stay after an error in their removal, as they do if the index may come back.
                let left = strays(&folder, kind);
                let may = is_new || name.starts_with("unlink");
                assert!(may || left.is_empty(), "{context}: {left:?}");
                *outcomes.entry((name.clone(), error, code)).or_default() += 1;
                // The next save goes on, and nothing is left after it.
                let _durable = save_together(kind, &folder, 7).unwrap();
                assert_eq!(
                    (content(&folder), strays(&folder, kind)),
                    (new.clone(), vec![]),
                    "{context}"
                );
            }
        }
    }
    assert!(outcomes.keys().any(|(_, _, code)| *code == Some(5)), "{outcomes:?}");
    println!("{} errors: {outcomes:?}", outcomes.values().sum::<usize>());
}
