//! Every state that a power loss at any point could leave behind. The same check finds incorrect implementations.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::Path;

use super::log::Call;
use super::loss::outcomes;
use super::memory::Memory;
use super::{content, fill_with, place, replaced};
use crate::atomic::disk::{Disk, DiskFile};
use crate::atomic::place::is_temporary;
use crate::atomic::replace_on;

const PIECE: usize = 1300;

/// Simulates each power loss after each operation of `save`. Returns the number of states, or the one that is wrong.
fn check(
    old: Option<&[u8]>,
    new: &[u8],
    sync_every: u64,
    save: impl Fn(&Memory, &Path) -> io::Result<()>,
) -> Result<usize, String> {
    let path = Path::new("/folder/model.bin");
    let disk = Memory::with(path, old, sync_every);
    let start = disk.state().ops.len();
    save(&disk, path).map_err(|error| error.to_string())?;
    let ops = disk.state().ops.clone();
    let mut states = BTreeSet::new();
    let mut seen = 0;
    for end in start..=ops.len() {
        for found in outcomes(&ops[..end], path) {
            seen += 1;
            let file = found.get(path).map(Vec::as_slice);
            let is_new = file == Some(new);
            if !is_new && (file != old || end == ops.len()) {
                let length = file.map(<[u8]>::len);
                return Err(format!("after {end} of {}: {length:?} bytes", ops.len()));
            }
            let stray = found.keys().find(|&p| p != path && !is_temporary(p.file_name().unwrap()));
            assert!(stray.is_none(), "{stray:?}");
            states.insert(is_new);
        }
    }
    assert_eq!(states.len(), 2, "both the old and the new file should occur: {states:?}");
    Ok(seen)
}

fn save(disk: &Memory, path: &Path, new: &[u8]) -> io::Result<()> {
    replaced(replace_on(disk, &place(path), &mut fill_with(new, PIECE)));
    Ok(())
}

#[test]
fn a_power_loss_leaves_the_old_or_the_new_file() {
    let mut seen = 0;
    for (old, new) in [(3000, 4100), (4100, 3000), (10, 1), (1, 512), (0, 5000), (2000, 0)] {
        let (old, new) = (content(1, old), content(2, new));
        for old in [Some(old.as_slice()), None] {
            for every in [u64::MAX, 1000] {
                seen += check(old, &new, every, |disk, path| save(disk, path, &new)).unwrap();
            }
        }
    }
    println!("{seen} states after a power loss");
}

#[test]
fn the_check_finds_incorrect_implementations() {
    let (old, new) = (content(1, 3000), content(2, 4100));
    let found = |save: &dyn Fn(&Memory, &Path) -> io::Result<()>| {
        check(Some(&old), &new, u64::MAX, save).unwrap_err()
    };
    for skipped in [Call::SyncAll, Call::SyncFolder] {
        let without = |disk: &Memory, path: &Path| {
            disk.state().skipped = Some(skipped);
            save(disk, path, &new)
        };
        println!("without {skipped:?}: {}", found(&without));
    }
    let temporary = Path::new("/folder/.model.bin.1-0.tmp");
    let renamed_first = |disk: &Memory, path: &Path| {
        let mut file = disk.create_new(temporary)?;
        file.write_all(&new)?;
        disk.rename(temporary, path)?;
        file.sync_all()?;
        disk.sync_folder(&())
    };
    println!("renamed before the sync: {}", found(&renamed_first));
    let in_place = |disk: &Memory, path: &Path| {
        let mut file = disk.open(path)?;
        file.write_all(&new)?;
        file.sync_all()
    };
    println!("in place: {}", found(&in_place));
    let removed_first = |disk: &Memory, path: &Path| {
        let mut file = disk.create_new(temporary)?;
        file.write_all(&new)?;
        file.sync_all()?;
        disk.remove(path)?;
        disk.rename(temporary, path)?;
        disk.sync_folder(&())
    };
    println!("removed before the rename: {}", found(&removed_first));
    let synced_early = |disk: &Memory, path: &Path| {
        let mut file = disk.create_new(temporary)?;
        file.write_all(&new[..4000])?;
        file.sync_all()?;
        file.write_all(&new[4000..])?;
        disk.rename(temporary, path)?;
        disk.sync_folder(&())
    };
    println!("synced before the last write: {}", found(&synced_early));
}
