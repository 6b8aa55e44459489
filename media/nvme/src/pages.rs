//! The Identify pages of a namespace and its controller, in the order in which they are read.

use sealblock_protocols_nvme::TooShort;
use sealblock_protocols_nvme::admin::Cns;
use sealblock_protocols_nvme::extensions::Extensions;
use sealblock_protocols_nvme::identify::{
    Controller, ControllerType, IndependentNamespace, Namespace, NamespaceFormatError, NamespaceId, NvmController,
    NvmNamespace, namespace_ids,
};
use sealblock_protocols_nvme::registers::Capabilities;
use sealblock_runtime_memory::Buffer;

/// The pages of one namespace and its controller.
#[derive(Clone)]
pub struct IdentifyPages {
    /// CAP.
    pub capabilities: Capabilities,
    /// CNS 01h.
    pub controller: Controller,
    /// CNS 06h, if the controller has it.
    pub nvm_controller: Option<NvmController>,
    /// CNS 00h.
    pub namespace: Namespace,
    /// CNS 05h, if the controller has it.
    pub nvm_namespace: Option<NvmNamespace>,
    /// CNS 08h, if the controller has it.
    pub independent: Option<IndependentNamespace>,
    /// CNS 03h; empty if the controller lacks it.
    pub ids: Vec<NamespaceId>,
    /// Sealblock's vendor specific extensions that the namespace supports.
    pub extensions: Extensions,
    /// Bitmap pages of its reserved area.
    pub bitmap_pages: u32,
    /// The identity of the namespace at another target that it is, where its target says so.
    pub origin: Option<[u8; 16]>,
    /// The identities that its target lists, of its device and of all at other targets that this lies on.
    pub identities: Vec<[u8; 16]>,
    /// The number of its content, where its target says it.
    pub content: Option<u64>,
}

/// The reasons why a namespace cannot be used.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NamespaceError {
    /// A page is inconsistent, or the controller is of another type than expected.
    #[error("{what} has {why}")]
    Unexpected {
        /// The page.
        what: &'static str,
        /// What is wrong.
        why: String,
    },
    /// The namespace's format is not supported.
    #[error("namespace {nsid} cannot be used: {source}")]
    Format {
        /// Its NSID.
        nsid: u32,
        /// Why.
        source: NamespaceFormatError,
    },
    /// The namespace has a property that this host does not support.
    #[error("namespace {nsid} cannot be used: {why}")]
    Unsupported {
        /// Its NSID.
        nsid: u32,
        /// What.
        why: String,
    },
    /// The namespace has another identifier, size, format or serial number than before.
    #[error("it is another namespace now: {what}")]
    Changed {
        /// What differs.
        what: String,
    },
}

/// Executes Identify.
pub trait Admin {
    /// The error of a page that cannot be read.
    type Error: From<NamespaceError>;

    /// A whole page of Identify.
    fn identify(&self, cns: Cns, nsid: u32) -> impl Future<Output = Result<Buffer, Self::Error>>;

    /// The same; `None` if the controller does not support the page.
    fn identify_if_known(&self, cns: Cns, nsid: u32) -> impl Future<Output = Result<Option<Buffer>, Self::Error>>;
}

/// Identify Controller, with its type and queue entry sizes checked.
///
/// # Errors
/// [`NamespaceError::Unexpected`], and those of the command.
pub async fn identify_controller<A: Admin>(admin: &A) -> Result<Controller, A::Error> {
    const WHAT: &str = "Identify Controller";
    let unexpected = |why| A::Error::from(NamespaceError::Unexpected { what: WHAT, why });
    let controller = decode::<_, A>(Controller::decode(&admin.identify(Cns::Controller, 0).await?), WHAT)?;
    let kind = controller.cntrltype;
    // Controllers before version 1.4 have 0 there.
    if kind != 0 && ControllerType::from_code(kind) != Some(ControllerType::Io) {
        return Err(unexpected(format!("a controller of type {kind}, which has no namespaces")));
    }
    // This host's queue entries have 64 and 16 bytes.
    let (sqes, cqes) = (controller.sqes, controller.cqes);
    if kind == ControllerType::Io.code() && (sqes & 0xF > 6 || sqes >> 4 < 6 || cqes & 0xF > 4) {
        return Err(unexpected(format!("queue entries that no host has (SQES {sqes:#x}, CQES {cqes:#x})")));
    }
    Ok(controller)
}

/// The pages of namespace `nsid`, without those of extensions. `known` is the page of the controller, if it was read
/// before.
///
/// # Errors
/// Pages that are inconsistent, and those of the commands.
pub async fn namespace_pages<A: Admin>(
    admin: &A,
    capabilities: Capabilities,
    known: Option<Controller>,
    nsid: u32,
) -> Result<IdentifyPages, A::Error> {
    let controller = match known {
        Some(controller) => controller,
        None => identify_controller(admin).await?,
    };
    let namespace = admin.identify(Cns::Namespace, nsid).await?;
    let namespace = decode::<_, A>(Namespace::decode(&namespace), "Identify Namespace")?;
    let ids = admin.identify_if_known(Cns::NamespaceDescriptors, nsid).await?;
    let nvm_namespace = match admin.identify_if_known(Cns::CommandSetNamespace, nsid).await? {
        Some(page) => Some(decode::<_, A>(NvmNamespace::decode(&page), "Identify CNS 05h")?),
        None => None,
    };
    let nvm_controller = match admin.identify_if_known(Cns::CommandSetController, 0).await? {
        Some(page) => Some(decode::<_, A>(NvmController::decode(&page), "Identify CNS 06h")?),
        None => None,
    };
    let independent = match admin.identify_if_known(Cns::IndependentNamespace, nsid).await? {
        Some(page) => Some(decode::<_, A>(IndependentNamespace::decode(&page), "Identify CNS 08h")?),
        None => None,
    };
    let ids = ids.map(|page| namespace_ids(&page)).unwrap_or_default();
    let (extensions, bitmap_pages) = (Extensions::NONE, 0);
    Ok(IdentifyPages {
        capabilities,
        controller,
        nvm_controller,
        namespace,
        nvm_namespace,
        independent,
        ids,
        extensions,
        bitmap_pages,
        origin: None,
        identities: Vec::new(),
        content: None,
    })
}

fn decode<T, A: Admin>(page: Result<T, TooShort>, what: &'static str) -> Result<T, A::Error> {
    page.map_err(|short| NamespaceError::Unexpected { what, why: short.to_string() }.into())
}
