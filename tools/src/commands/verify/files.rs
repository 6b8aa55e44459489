//! The files that damaged blocks are of, for blocks of a file or a block device of this machine.

use std::path::{Path, PathBuf};

use sealblock_block::Device;
use sealblock_stack::OpenTarget;
use sealblock_stack::kernel::owners::{self, FilePlace, MAX_BLOCKS, Owners};
use sealblock_stack::range::Run;
use sealblock_stack::target::TargetName;

use crate::interrupt;
use crate::report::{FileAt, VerifyReport, note};

/// Max. lines; the report as JSON has all.
const MAX_LINES: usize = 1000;

/// The file or block device whose bytes a target's blocks are.
struct Base {
    path: PathBuf,
    /// The block of it that is block 0 of the target.
    first: u64,
    is_block_device: bool,
    /// True if a volume is between: which of its bytes a block is, is the volume's own business.
    is_volume: bool,
}

impl Base {
    /// That of a target; nothing for a group, for what is remote, and for memory.
    fn of(opened: &OpenTarget) -> Option<Base> {
        let (mut target, mut first) = (opened.target(), 0_u64);
        loop {
            match target {
                TargetName::Offset { range, target: inner } => {
                    first = first.checked_add(range.first().get())?;
                    target = inner;
                }
                TargetName::Fault { target: inner, .. } => target = inner,
                TargetName::File(_) | TargetName::Raw(_) | TargetName::Linux { .. } => break,
                _ => return None,
            }
        }
        let info = opened.info.all().into_iter().find(|info| info.file.is_some())?;
        let file = info.file.as_ref()?;
        let (path, is_block_device) = (file.path.clone(), file.is_block_device);
        Some(Base { path, first, is_block_device, is_volume: info.volume.is_some() })
    }

    fn itself(&self, lba: u64, block_bytes: u64) -> Vec<FileAt> {
        let offset = (!self.is_volume).then(|| (self.first + lba).saturating_mul(block_bytes));
        vec![FileAt { path: self.path.to_string_lossy().into_owned(), offset }]
    }
}

/// The report with the files of its errors, where they can be told.
pub(super) fn with_files(mut report: VerifyReport, opened: &OpenTarget, is_quiet: bool) -> VerifyReport {
    // A verify that goes on later looks for them when it is complete.
    if report.errors.is_empty() || report.resume.is_some() {
        return report;
    }
    let Some(base) = Base::of(opened) else { return report };
    let block_bytes = opened.device.geometry().block_size.bytes() as u64;
    if !base.is_block_device {
        for error in &mut report.errors {
            error.files = Some(base.itself(error.lba, block_bytes));
        }
        return report;
    }
    if base.is_volume {
        // The blocks are those of the volume, and no file system has the device.
        return report;
    }
    if !is_quiet {
        note(&format_args!("looking for the files of damaged blocks of {}", report.target));
    }
    let mut lbas: Vec<u64> = report.errors.iter().map(|error| error.lba).collect();
    lbas.dedup();
    lbas.truncate(MAX_BLOCKS + 1);
    match find(&base, &lbas, block_bytes) {
        Err(why) => report.files_notes.push(why),
        Ok(owners) => {
            for error in &mut report.errors {
                let Ok(number) = lbas.binary_search(&error.lba) else { continue };
                // What was not looked for is not known to have none.
                if number < MAX_BLOCKS {
                    error.files = owners.of_blocks.get(number).map(|files| files.iter().map(file_at).collect());
                }
            }
            report.files_notes.extend(owners.notes);
            report.are_files_told = true;
            if !owners.was_asked {
                report.files_notes.push(format!("no file system on {} is mounted", base.path.display()));
            }
        }
    }
    report
}

fn find(base: &Base, lbas: &[u64], block_bytes: u64) -> Result<Owners, String> {
    let starts: Vec<u64> = lbas.iter().map(|lba| (base.first + lba).saturating_mul(block_bytes)).collect();
    let owners = owners::find(&base.path, &starts, block_bytes, &interrupt::came);
    owners.map_err(|error| format!("cannot determine what is on {}: {error}", base.path.display()))
}

fn file_at(place: &FilePlace) -> FileAt {
    FileAt { path: place.path.to_string_lossy().into_owned(), offset: Some(place.offset_bytes) }
}

/// The lines that name files, for people.
pub(super) fn lines(report: &VerifyReport, prefix: &str) -> Vec<String> {
    let mut lines = Vec::new();
    if report.are_files_told {
        let block_bytes = report.bytes_verified.checked_div(report.blocks_verified).unwrap_or(0);
        let mut runs: Vec<Run<&[FileAt]>> = Vec::new();
        for error in &report.errors {
            let Some(files) = &error.files else { continue };
            match runs.last_mut() {
                Some(run) if run.lba + run.blocks > error.lba => {}
                Some(run) if run.end() == error.lba && goes_on(run, files, block_bytes) => run.blocks += 1,
                _ => runs.push(Run::new(error.lba, 1, files)),
            }
        }
        let more = runs.len().saturating_sub(MAX_LINES);
        lines.extend(
            runs.iter().take(MAX_LINES).map(|run| format!("{prefix}{}: {}", run.place(), files_text(run.what))),
        );
        if more > 0 {
            lines.push(format!("{prefix}and {more} more runs; --json has their files"));
        }
    }
    lines.extend(report.files_notes.iter().map(|why| format!("{prefix}files may be missing: {why}")));
    lines
}

/// True if a block behind a run continues the files of the run.
fn goes_on(run: &Run<&[FileAt]>, files: &[FileAt], block_bytes: u64) -> bool {
    let distance = run.blocks * block_bytes;
    run.what.len() == files.len()
        && run.what.iter().zip(files).all(|(first, next)| {
            first.path == next.path && first.offset.map(|offset| offset.saturating_add(distance)) == next.offset
        })
}

fn files_text(files: &[FileAt]) -> String {
    if files.is_empty() {
        return "free space, metadata, or a file that was not found".to_owned();
    }
    let each = files.iter().map(|file| {
        let path = shown(Path::new(&file.path));
        file.offset.map_or(path.clone(), |offset| format!("{path} at byte {offset}"))
    });
    each.collect::<Vec<_>>().join(", and ")
}

/// A path without control characters, which a terminal would obey.
fn shown(path: &Path) -> String {
    sealblock_stack::printable(&path.to_string_lossy()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(places: &[(&str, u64)]) -> Vec<FileAt> {
        places.iter().map(|(path, offset)| FileAt { path: (*path).to_owned(), offset: Some(*offset) }).collect()
    }

    #[test]
    fn a_run_is_of_one_place_in_its_files() {
        let first = files(&[("/a", 4096), ("/b", 0)]);
        let run = Run::new(7, 2, &first[..]);
        assert!(goes_on(&run, &files(&[("/a", 12288), ("/b", 8192)]), 4096));
        assert!(!goes_on(&run, &files(&[("/a", 12288), ("/b", 4096)]), 4096));
        assert!(!goes_on(&run, &files(&[("/a", 12288)]), 4096));
        assert!(!goes_on(&run, &files(&[("/a", 12288), ("/c", 8192)]), 4096));
    }

    #[test]
    fn what_has_no_file_is_said_to_have_none_that_was_found_and_no_path_rules_the_terminal() {
        assert_eq!(files_text(&[]), "free space, metadata, or a file that was not found");
        assert_eq!(files_text(&files(&[("/a b", 5), ("/c", 0)])), "/a b at byte 5, and /c at byte 0");
        assert_eq!(files_text(&files(&[("/\u{1b}[2J", 0)])), "/\\u{1b}[2J at byte 0");
    }
}
