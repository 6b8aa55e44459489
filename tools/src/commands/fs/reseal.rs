//! `sealblock fs verify --repair`, `--reseal` and `--forget-tags`: what is done before everything is verified. Damaged copies
//! are written anew; what is known of the tags of data without checksums changes.

use sealblock_btrfs::verify::{
    Repaired, Report, VerifyOptions, Watch, WhyUnchecked, find_unsummed, repair as write_anew, verify,
};
use sealblock_btrfs_engine::engine::{Engine, EngineError, EngineOptions};
use sealblock_btrfs_engine::reseal::Resealed;
use sealblock_runtime_reactor::submitted;
use sealblock_stack::filesystem::{FilesystemName, OpenFilesystem, filesystem_error};
use sealblock_stack::{Cause, StackError, on_reactor};
use serde::Serialize;

use super::place::say_state;
use super::write::engine_error;
use crate::report::note_lost_answers;

const RESEAL: &str = "reseal";

/// What was written anew, in JSON.
#[derive(Serialize)]
pub(super) struct RepairReport {
    /// Copies of nodes.
    nodes: u64,
    /// Bytes of copies of data.
    data_bytes: u64,
    /// Copies that could not be written, and why.
    failed: Vec<String>,
}

impl RepairReport {
    /// A line for each copy that could not be written, and one for all others.
    pub fn lines(&self) -> Vec<String> {
        let failed = self.failed.iter().map(|copy| format!("not repaired: {copy}"));
        failed.chain([format!("repaired: {} nodes and {} bytes of data", self.nodes, self.data_bytes)]).collect()
    }
}

/// Writes damaged copies of nodes and data anew, from copies that are good.
pub(super) fn repair(name: &FilesystemName, watch: &dyn Watch) -> Result<RepairReport, StackError> {
    const REPAIR: &str = "repair";
    opened_to_write(name, REPAIR, async |open| {
        let failed = |error| filesystem_error(REPAIR, &error).on(name.devices());
        let filesystem = &open.filesystem;
        let report = verify(filesystem, VerifyOptions::default(), watch).await.map_err(failed)?;
        if report.unchecked.contains_key(&WhyUnchecked::Stopped) {
            return Err(StackError::new(Cause::Refused, REPAIR, "it was interrupted before anything was written"));
        }
        let Repaired { nodes, data_bytes, failed: not } = write_anew(filesystem, &report).await.map_err(failed)?;
        Ok(RepairReport { nodes, data_bytes, failed: not.iter().map(ToString::to_string).collect() })
    })
}

/// What became of data without tags, in JSON.
#[derive(Serialize)]
pub(super) struct ResealReport {
    /// Bytes that got tags, counting each copy.
    bytes: u64,
    /// True if all data without checksums have their tags now.
    complete: bool,
    refused: Vec<RefusedReport>,
    refused_unlisted: u64,
}

/// A sector that got no tag.
#[derive(Serialize)]
struct RefusedReport {
    logical: u64,
    why: String,
}

impl ResealReport {
    fn of(resealed: Resealed) -> ResealReport {
        let Resealed { bytes, refused, refused_count, is_whole, .. } = resealed;
        let refused_unlisted = refused_count - refused.len() as u64;
        let refused: Vec<RefusedReport> =
            refused.into_iter().map(|(logical, why)| RefusedReport { logical, why }).collect();
        ResealReport { bytes, complete: is_whole && refused.is_empty(), refused, refused_unlisted }
    }

    /// A line for each sector that got no tag, and one for all.
    pub fn lines(&self) -> Vec<String> {
        let refused =
            self.refused.iter().map(|one| format!("not resealed, at the logical address {}: {}", one.logical, one.why));
        let more = (self.refused_unlisted > 0).then(|| format!("not resealed: {} more", self.refused_unlisted));
        let end = match self.complete {
            true => "all data without checksums have their tags",
            false => "not all data have their tags, so no more are demanded than before",
        };
        refused.chain(more).chain([format!("resealed: {} bytes; {end}", self.bytes)]).collect()
    }
}

/// Gives all data of a filesystem without checksums the tags that they lack.
pub(super) fn reseal(name: &FilesystemName, watch: &dyn Watch) -> Result<ResealReport, StackError> {
    opened_to_write(name, RESEAL, async |open| {
        let failed = |error| filesystem_error("read", &error).on(name.devices());
        let (report, data) = find_unsummed(&open.filesystem, VerifyOptions::default(), watch).await.map_err(failed)?;
        check_whole(&report).map_err(|error| error.on(name.devices()))?;
        let engine = open_engine(open, name, RESEAL).await?;
        let resealed = engine.reseal(&data, watch).await;
        engine.finish_writes().await;
        resealed.map(ResealReport::of).map_err(|error| engine_error(RESEAL, &error).on(name.devices()))
    })
}

/// Forgets which data have tags.
pub(super) fn forget_tags(name: &FilesystemName) -> Result<(), StackError> {
    const FORGET: &str = "forget the tags of";
    opened_to_write(name, FORGET, async |open| {
        let engine = open_engine(open, name, FORGET).await?;
        let forgotten = engine.forget_tags().await;
        engine.finish_writes().await;
        forgotten.map_err(|error| engine_error(FORGET, &error).on(name.devices()))
    })
}

/// Data of nodes that cannot be read now may be read later, and would then lack a tag that is demanded.
fn check_whole(report: &Report) -> Result<(), StackError> {
    let refuse = |cause, why: String| {
        let refused = StackError::new(cause, RESEAL, why);
        Err(refused.advise("without --reseal, `sealblock fs verify` says more"))
    };
    if let Some(finding) = report.findings.first() {
        return refuse(Cause::Damaged, format!("not all data can be found: {finding}"));
    }
    // Which copy below a device is read makes no difference to where data are.
    let mut unchecked = report.unchecked.keys().filter(|why| **why != WhyUnchecked::CopiesBelow);
    match unchecked.next() {
        Some(WhyUnchecked::Stopped) => refuse(Cause::Refused, "it was interrupted before anything was written".into()),
        Some(why) => refuse(Cause::Unsuitable, format!("not all data can be found: {why}")),
        None => Ok(()),
    }
}

fn opened_to_write<T>(
    name: &FilesystemName,
    action: &str,
    work: impl AsyncFnOnce(&OpenFilesystem) -> Result<T, StackError>,
) -> Result<T, StackError> {
    if name.has_place {
        let why = "this is for a whole filesystem only";
        return Err(StackError::new(Cause::Usage, action, why).on(name).advise("leave out the path"));
    }
    on_reactor(async {
        let open = name.open_to_write().await?;
        open.targets().iter().for_each(note_lost_answers);
        say_state(name, &open.filesystem);
        open.close_after(async |open| work(open).await).await
    })
}

async fn open_engine(open: &OpenFilesystem, name: &FilesystemName, action: &str) -> Result<Engine, StackError> {
    let options = EngineOptions { submitted: Some(|| Box::pin(submitted())), ..EngineOptions::default() };
    let failed = |error: EngineError| engine_error(action, &error).on(name.devices());
    Engine::open(&open.filesystem, options).await.map_err(failed)
}
