package presubmit

// A place is where a package stands in the tree. Its number is its row: a
// package may import packages of lower rows only.
type place struct {
	pkg string // below the module
	row int
	why string
}

// beside is for what stands beside the rows: it may import anything, and only
// commands, tests and others beside the rows may import it.
const beside = -1

// topRow holds the commands: nothing may import them, and they may import what is beside the rows.
const topRow = 9

// pureRow is the last row without a goroutine, socket, clock or logger.
const pureRow = 3

// rows says what stands in each row. docs/architecture.md has it as a table, with the packages.
var rows = []string{
	0: "standard library only",
	1: "values",
	2: "immutable values, codecs without I/O",
	3: "pure: decisions, compilation, state machines",
	4: "I/O without policy",
	5: "connections",
	6: "connections before policy",
	7: "policy meets I/O",
	8: "assembly",
	9: "wiring only",
}

// places has a line a package, planned ones among them.
var places = []place{
	{"sniff", 0, "tells protocols apart by bytes alone"},
	{"mtls/spiffeid", 0, "identities are values"},
	{"cni/api", 0, "what plugin and server say to each other"},
	{"dataplane/httpmsg", 0, "message values that every codec shares"},
	{"dataplane/share", 0, "how pods divide what they have in common"},
	{"dataplane/plain", 0, "text that a terminal does not act upon"},

	{"dataplane/model", 1, "the mesh as values"},
	{"tproxy/rules", 1, "kernel rules as values, before they are applied"},

	{"dataplane/snapshot", 2, "the model made fast to look up"},
	{"dataplane/journal", 2, "what is recorded of a connection or request, as values"},
	{"dataplane/http1", 2, "sans-IO codec"},
	{"dataplane/http2", 2, "sans-IO codec"},
	{"dataplane/hpack", 2, "sans-IO codec"},
	{"controlplane/endpointmeta", 2, "reads annotations into the model"},
	{"controlplane/registrypb", 2, "the registry's messages"},
	{"controlplane/input", 2, "what sources say to the loop, as values"},

	{"dataplane/decide", 3, "decides on a snapshot, purely"},
	{"dataplane/decide/reference", 3, "the slow and obvious decide, to test against"},
	{"dataplane/authz", 3, "words a question to an authorization service, purely"},
	{"dataplane/balance", 3, "picks endpoints, purely"},
	{"dataplane/exchange", 3, "one request as a state machine"},
	{"controlplane/compile", 3, "makes a snapshot of a model, purely"},
	{"controlplane/gamma", 3, "what Kubernetes objects mean, purely"},
	{"controlplane/registry", 3, "which rows are valid, what they mean, and where they stand in a store"},

	{"mtls", 4, "TLS configurations and their verification"},
	{"mtls/record", 4, "TLS records over memory"},
	{"mtls/devca", 4, "an authority for trials and tests"},
	{"mtls/spire", 4, "identities from SPIRE"},
	{"mtls/files", 4, "identities from files"},
	{"tproxy/netns", 4, "enters network namespaces"},
	{"tproxy/socket", 4, "makes sockets in them"},
	{"dataplane/reactor", 4, "the epoll loop, which knows no protocol"},
	{"dataplane/telemetry", 4, "counts and exports; knows no connection"},

	{"dataplane/engine", 5, "drives codecs and exchanges on a loop"},
	{"dataplane/extauthz", 5, "asks the authorization service while requests are parked"},
	{"dataplane/relay", 5, "copies bytes between connections"},
	{"controlplane/kube/follow", 5, "what there is of a kind of Kubernetes' objects, and what becomes of it"},
	{"controlplane/registrar/target", 5, "where registrars are"},
	{"meshhop", 5, "mTLS sessions and their pools"},
	{"quic", 5, "the QUIC hop"},
	{"tproxy/apply", 5, "puts rules into the kernel"},

	{"dataplane/detect", 6, "finds the protocol of a connection by its first bytes"},

	{"dataplane/admin/guard", 7, "who may ask an admin, and what an answer may cost"},
	{"dataplane/outbound", 7, "the client's side, with policy"},
	{"dataplane/inbound", 7, "the server's side, with policy"},
	{"dataplane/listen", 7, "listeners of pods"},
	{"controlplane/file", 7, "a source of the model"},
	{"controlplane/etcd", 7, "a source of the model"},
	{"controlplane/kube", 7, "a source of the model"},
	{"controlplane/lastgood", 7, "the last good state, on disk"},
	{"controlplane/meshdns", 7, "names of the mesh"},
	{"controlplane/kubestore", 7, "the registry's rows, derived from pods and nodes"},
	{"controlplane/registrar/services", 7, "Services out of rows"},
	{"controlplane/registrar/client", 7, "a source of the model"},
	{"controlplane/registrar/server", 7, "endpoints in, Services out"},
	{"controlplane/registrar/register", 7, "the node's own endpoints, told to a registrar"},

	{"dataplane", 8, "assembles a node"},
	{"dataplane/admin", 8, "shows a node"},
	{"controlplane", 8, "the loop that owns the inputs"},
	{"controlplane/local", 8, "the life of this node's pods; a source of the model, and what writes their rows"},
	{"cni/server", 8, "takes pods from the plugin"},
	{"cni/plugin", 8, "what the kubelet runs"},

	{"cmd/aether-proxy", topRow, "wiring only"},
	{"cmd/aether-dns", topRow, "wiring only"},
	{"cmd/aether-cni", topRow, "wiring only"},
	{"cmd/aether-registrar", topRow, "wiring only"},
	{"cmd/aetherctl", topRow, "wiring only"},

	{"", beside, "bench_test.go, so that `go test -bench ./bench` works"},
	{"bench", beside, "measures"},
	{"bench/load", beside, "makes load for bench"},
	{"bench/registrar", beside, "measures the registrar with a fleet of nodes"},
	{"bench/fairness", beside, "measures a pod's neighbour, on the rig"},
	{"bench/soak", beside, "holds two ways of waiting against each other, on the rig"},
	{"dataplane/detect/detecttest", beside, "first bytes of HTTP/2 clients, for tests"},
	{"e2e/presubmit", beside, "this test"},
	{"e2e/rig", beside, "nodes and pods out of namespaces"},
	{"e2e/mesh", beside, "a mesh with its proxies on the rig"},
	{"e2e/demo", beside, "the demo"},
	{"e2e/limits", beside, "writes docs/limits.md"},
	{"e2e/tiers", beside, "runs all tests, and says how far"},
	{"e2e/counts", beside, "what tests say of how much they looked at"},
	{"e2e/testseed", beside, "the numbers that random tests draw from"},
	{"e2e/mutants", beside, "breaks the decision core on purpose"},
	{"e2e/netns", beside, "tests on the rig"},
	{"e2e/life", beside, "tests of pods' lives through whole data planes"},
	{"e2e/h2spec", beside, "the HTTP/2 conformance suite"},
	{"e2e/peer", beside, "tests against other proxies"},
	{"e2e/ambiguity", beside, "tests that hold ambiguous requests against other proxies"},
	{"e2e/faults", beside, "takes parts of the control plane away under traffic"},
	{"e2e/etcdtest", beside, "real etcd for tests"},
	{"e2e/registrar", beside, "tests of registrars over real etcd"},
	{"e2e/cluster", beside, "tests in a real cluster"},
	{"e2e/cluster/apiserver", beside, "real API servers for tests"},
	{"e2e/cluster/apiserver/setup", beside, "how they are started"},
	{"e2e/tool", beside, "builds what tests run from modules that pin it"},
	{"e2e/prebuild", beside, "builds it ahead"},
	{"sniff/replay", beside, "captures through sniff; keeps gopacket out of the proxy"},
	{"dataplane/model/modeltest", beside, "meshes for tests"},
	{"dataplane/snapshot/snapshottest", beside, "compares snapshots in tests"},
	{"tproxy/netns/netnstest", beside, "namespaces for tests"},
	{"controlplane/registrar/server/storetest", beside, "a registry for tests"},
}

// sideways are the imports allowed within a row: from, to, why.
var sideways = [][3]string{
	{"dataplane/http2", "dataplane/hpack", "HPACK is the lower half of HTTP/2"},
	{"dataplane/decide/reference", "dataplane/decide", "it answers in the same verdicts"},
	{"mtls/files", "mtls", "it is a source of what mtls uses"},
	{"mtls/devca", "mtls", "it is a source of what mtls uses"},
	{"mtls/spire", "mtls", "it is a source of what mtls uses"},
	{"tproxy/socket", "tproxy/netns", "a socket is made inside a namespace"},
	{"dataplane/admin", "dataplane", "it shows a node"},
}

// apart may be lifted out of this module: they import nothing of the rest but each other.
var apart = []string{"sniff", "tproxy", "mtls", "meshhop", "quic"}

// only says where an import (or what is below it) may stand. The first line
// that fits counts. bench and e2e are free.
var only = []struct {
	path string
	in   []string // packages, or what is below them
	why  string
}{
	{"k8s.io/client-go", []string{"controlplane/kube", "controlplane/gamma", "controlplane/kubestore", "controlplane/registrar/server", "controlplane/registrar/services", "cni/server"},
		"the Kubernetes client is big, and its world should end at the sources"},
	{"k8s.io", []string{"controlplane/kube", "controlplane/gamma", "controlplane/kubestore", "controlplane/registrar/server", "controlplane/registrar/services", "cni/server", "controlplane/file", "controlplane/compile"},
		"Kubernetes types stop above the model"},
	{"sigs.k8s.io/gateway-api", []string{"controlplane/kube", "controlplane/gamma", "controlplane/registrar/server", "controlplane/file", "controlplane/compile"},
		"Gateway API types stop above the model"},
	{"go.etcd.io", []string{"controlplane/etcd"}, "etcd is one registry backend of several"},
	{"github.com/quic-go", []string{"quic"}, "QUIC joins the exchange by the mailbox, and nowhere else"},
	{"github.com/vishvananda", []string{"tproxy", "cni"}, "the kernel's network is touched in one place"},
	{"github.com/mdlayher/netlink", []string{"tproxy", "cni"}, "the kernel's network is touched in one place"},
	{"github.com/google/nftables", []string{"tproxy", "cni"}, "the kernel's network is touched in one place"},
	{"github.com/prometheus", []string{"dataplane/telemetry"}, "everything else counts through a typed interface"},
	{"github.com/envoyproxy/go-control-plane", nil, "it makes a binary 14 MB bigger: an oracle for tests; dataplane/authz writes Envoy's message itself"},
	{"google.golang.org/grpc", []string{"dataplane/extauthz", "mtls/spire", "controlplane", "cni"},
		"gRPC of the proxy's own goes to services beside the traffic; the traffic's is carried by the codecs"},
	{"github.com/gopacket", []string{"sniff/replay"}, "captures are for tests and tools, not for the proxy"},
	{"golang.org/x/net/http2/hpack", []string{"dataplane/hpack", "dataplane/http2"}, "an HPACK codec is a codec"},
	{"golang.org/x/net/http2", nil, "deprecated for net/http: an oracle for tests, never a codec"},
	{"net/http", []string{"dataplane/admin", "dataplane/telemetry", "controlplane", "cni", "cmd"},
		"the data path has its own codecs"},
}

// topLevel is all that may stand at the root, beside files whose names begin
// with a dot and what git ignores.
var topLevel = []string{
	"cmd", "tools", "dataplane", "sniff", "tproxy", "mtls", "meshhop", "quic", "controlplane", "cni", "bench", "e2e", "docs",
	"go.mod", "go.sum", "Makefile", "README.md", "CONTRIBUTING.md", "LICENSE", "bench_test.go",
	"bin", // made by make build, ignored by git
}
