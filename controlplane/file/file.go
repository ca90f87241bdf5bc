// Package file is a configuration source: a directory of ordinary Kubernetes
// YAML, read whole into one model.Mesh and read again whenever it changes.
//
//   - It reads Pod, Service, ServiceAccount, Node; HTTPRoute, GRPCRoute, TCPRoute,
//     TLSRoute and ReferenceGrant of the Gateway API; HTTPFilter, EndpointPolicy and
//     MeshConfig of config.aether.io: alone, in multi-document files, or in a List, from *.yaml,
//     *.yml and *.json at any depth.
//   - Strict: a field, an annotation of ours or a value that is not understood
//     refuses the object that holds it, by file and line, and nothing else.
//   - Fail closed: what is refused of a route stays as rules that answer 500 to
//     the requests that pick them; it never becomes a missing rule. A refused
//     HTTPFilter stays, marked, and refuses what it governs.
//   - Two objects of one name: the first in order of path and line stands, the
//     other is refused and both places are named. Of HTTPFilters both are refused:
//     which of two policies was meant cannot be told.
//   - What is published is whole: a listing or a file that cannot be read at
//     the moment keeps what it last said.
//   - Kept: an object that can no longer be told from its file stays as it last was,
//     until the file can be told again or is removed (decision 045).
//
// It knows no API server, no registry and nothing of what becomes of a Mesh.
package file

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"aether/controlplane/gamma"
	"aether/controlplane/input"
	"aether/dataplane/model"
)

// Annotations that only this source reads: what a cluster knows of an object
// beside the object itself. Dump writes them.
const (
	// AnnotationNetNS is the path of a pod's network namespace, absolute.
	// Without it: <Options.NetNSDir>/<namespace>_<pod name>, for names are a namespace's.
	AnnotationNetNS = "file.aether.io/netns"
	// AnnotationContainerID is the key of a pod's sockets. Without it: <namespace>/<pod name>.
	AnnotationContainerID = "file.aether.io/container-id"
	// AnnotationCluster is the cluster a pod runs in. Without it: the local one, without a name.
	AnnotationCluster = "file.aether.io/cluster"
	// AnnotationRegion and AnnotationZone beat the labels of the pod's Node.
	AnnotationRegion = "file.aether.io/region"
	AnnotationZone   = "file.aether.io/zone"
	// AnnotationPart narrows a Pod to one of what it would be: "endpoint" (the
	// registry's row) or "workload" (the pod on this node). A pod between its
	// start and its registration is only the one or the other.
	AnnotationPart = "file.aether.io/part"
	// AnnotationTargetPorts on a Service and AnnotationInvalid on a route or HTTPFilter are package gamma's.
	AnnotationTargetPorts = gamma.AnnotationTargetPorts
	AnnotationInvalid     = gamma.AnnotationInvalid
	// AnnotationCatalog on a ServiceAccount, "true": the service of that name exists
	// in the mesh, as the registry's catalog says, even while none of its pods is
	// known here (model.Mesh.Catalog).
	AnnotationCatalog = "file.aether.io/catalog"
	// AnnotationRetained on a ServiceAccount: its service is kept against its
	// removal, with these HTTP ports: "8080,9090" (model.Mesh.Retained).
	AnnotationRetained = "file.aether.io/retained"
)

// Labels of contract 1.2, and the locality labels of contract 9.2.
const (
	LabelManaged     = "aether.io/managed"
	LabelMeshService = gamma.LabelMeshService
	LabelRegion      = "topology.kubernetes.io/region"
	LabelZone        = "topology.kubernetes.io/zone"
)

// Bounds of what is read. What lies beyond is reported and left out.
const (
	maxFileSize = 16 << 20 // bytes of one file
	maxTotal    = 256 << 20
	maxFiles    = 20000
	maxDirDepth = 16
	maxProblems = 1000 // reported at once; the last one says how many are not
)

// Options of a source. The zero value is usable: no pod is then of this node.
type Options struct {
	Node        string // this node's name: pods with that spec.nodeName are its workloads
	Domain      string // mesh domain; empty: aether.internal
	TrustDomain string // of the default identities; empty: the mesh domain
	NetNSDir    string // where the network namespaces of pods are; empty: /run/netns

	// RedirectAllDefault is what capture.aether.io/redirect-all means when a pod does not say (contract 1.5).
	RedirectAllDefault bool

	// OnPods, if not nil, is told by Feed of this node's pods, all of them after each change,
	// on Feed's goroutine. Somebody else leads their lives then, and what the Sink hears of
	// the directory has neither workloads nor endpoints of anybody.
	OnPods func(Local)

	// Before, if not nil, gives Feed what was in force before the process started, once that is known; nil:
	// nothing is. It is called once, on Feed's goroutine; nil is also right where ctx has ended.
	Before func(ctx context.Context) *Before
}

// Before is what was in force before the process started.
type Before struct {
	Batch input.Batch // Endpoints to Retained are looked at, and Workloads; they are not changed
	At    time.Time   // until when it was known to be true
}

// Local is what a directory says of one node's own pods.
type Local struct {
	Pods     []Pod          // by namespace and name
	Locality input.Locality // of the node
	// Partial: a document could not be read since the process started, and may be a pod's that is not in
	// Pods and has not gone.
	Partial bool
}

// Pod is one of a node's own, for whoever leads its life.
type Pod struct {
	Namespace, Name, UID, Account string
	// Container is that of the annotation; without it the UID, and without that <namespace>_<name>.
	Container           string
	NetNS               string // path
	IPs                 []netip.Addr
	Labels, Annotations map[string]string
	Volumes             []model.Volume // nil: they are not known
	// Terminating: metadata.deletionTimestamp is set. PreStop is the longest preStop.sleep of its
	// containers, Grace what it has until it is killed (contract 13.3).
	Terminating    bool
	PreStop, Grace time.Duration
}

func (o Options) withDefaults() Options {
	o.Domain = cmp.Or(o.Domain, model.DefaultDomain)
	o.TrustDomain = cmp.Or(o.TrustDomain, o.Domain)
	o.NetNSDir = cmp.Or(o.NetNSDir, "/run/netns")
	return o
}

// Load reads dir once. The Mesh is never nil; what could not be taken into it,
// the directory itself included, is among the problems, which are ordered by
// place. Slices of the Mesh are sorted, so equal directories give equal meshes.
func Load(dir string, o Options) (*model.Mesh, []model.Problem) {
	return LoadViews(dir, o).Mesh(o.Node)
}

func dirProblem(dir string, err error) model.Problem {
	return model.Problem{
		Object: "directory " + dir,
		Reason: fmt.Sprintf("cannot be read: %v: make it a directory that this process may list", err),
	}
}

const (
	gatewayGroup = gamma.GatewayGroup
	configGroup  = gamma.ConfigGroup
)

type problem = gamma.Problem

// finish sorts problems by place, drops repeats and bounds their number.
func finish(in []problem) []model.Problem {
	slices.SortStableFunc(in, func(a, b problem) int {
		return cmp.Or(cmp.Compare(a.File, b.File), cmp.Compare(a.Line, b.Line),
			cmp.Compare(a.Object, b.Object), cmp.Compare(a.Reason, b.Reason))
	})
	in = slices.Compact(in)
	var out []model.Problem
	for i, p := range in {
		if i == maxProblems {
			return append(out, model.Problem{
				Object: "configuration",
				Reason: fmt.Sprintf("%d more problems are not listed: mend the ones above first", len(in)-i),
			})
		}
		out = append(out, model.Problem{Object: p.Object, Where: place(p.File, p.Line), Reason: p.Reason, Part: p.Part, Since: p.Since})
	}
	return out
}

func place(file string, line int) string { return gamma.Place(file, line) }
