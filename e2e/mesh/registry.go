package mesh

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"

	"aether/e2e/rig"
)

// Registry are the binaries of a mesh whose nodes know of each other's pods by a registrar over
// a real etcd, both on the first node. They meet with certificates of whoever issues those
// of the pods (Options.DevCA).
type Registry struct {
	Etcd, Registrar string // paths
	// APIServer is the path of a kube-apiserver, which runs over that etcd, on the first node
	// as well. Pods are then objects there, too, of which the registrar makes its rows
	// (--store kubernetes); it keeps their Services there, which proxies read, and routes
	// (--kubeconfig). See API. Empty: there is none, and rows are kept in etcd.
	APIServer string
	LastGood  bool // the proxies keep their last good state on disk
	// EtcdURL is where the registrar is told that etcd is, for what stands between the two.
	// Empty: it finds etcd itself.
	EtcdURL string
}

const (
	etcdURL       = "http://127.0.0.1:2379"
	registrarPort = "8443"
	registrarURL  = "http://127.0.0.1:9902" // its admin
)

// proxyArgs are what proxies are told of the registry.
func (m *Mesh) proxyArgs(node *rig.Node) []string {
	r := m.o.Registry
	if r == nil {
		return nil
	}
	args := []string{"--registrar", net.JoinHostPort(m.Rig.Nodes[0].IP4.String(), registrarPort), "--state-dir", filepath.Join(m.Rig.Dir, "state")}
	if r.LastGood {
		args = append(args, "--last-good", filepath.Join(m.LastGoodDir(), node.Name))
	}
	if r.APIServer != "" {
		args = append(args, "--kubeconfig", m.kubeconfig())
	}
	return args
}

// LastGoodDir is where the proxies keep their last good states, a file a node.
func (m *Mesh) LastGoodDir() string { return filepath.Join(m.Rig.Dir, "last-good") }

// StartEtcd runs etcd, with the data that it had, and returns once it serves.
func (m *Mesh) StartEtcd(ctx context.Context) error {
	const peer = "http://127.0.0.1:2380"
	p, err := m.Rig.StartProcess(&m.Rig.Nodes[0].Space, "etcd", m.o.Registry.Etcd, "--name", "etcd", "--data-dir", filepath.Join(m.Rig.Dir, "etcd"),
		"--listen-client-urls", etcdURL, "--advertise-client-urls", etcdURL, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
		"--initial-cluster", "etcd="+peer, "--unsafe-no-fsync", "--log-level", "warn")
	if err != nil {
		return err
	}
	m.mu.Lock()
	m.etcd = p
	m.mu.Unlock()
	return p.Ready(ctx, func(ctx context.Context) error {
		_, err := m.Rows(ctx)
		return err
	})
}

// StartRegistrar runs the registrar; AwaitRegistrar waits for it.
func (m *Mesh) StartRegistrar() error {
	args := []string{m.o.Registry.Registrar, "--listen", ":" + registrarPort, "--trust-domain", m.o.TrustDomain, "--drain-time", drain}
	args = append(args, m.identityArgs()...)
	if m.o.Registry.APIServer != "" {
		args = append(args, "--store", "kubernetes", "--kubeconfig", m.kubeconfig())
	} else {
		args = append(args, "--etcd-endpoints", cmp.Or(m.o.Registry.EtcdURL, etcdURL))
	}
	p, err := m.Rig.StartProcess(&m.Rig.Nodes[0].Space, "registrar", args...)
	if err != nil {
		return err
	}
	m.mu.Lock()
	m.registrar = p
	m.mu.Unlock()
	return nil
}

// AwaitRegistrar returns once the registrar serves.
func (m *Mesh) AwaitRegistrar(ctx context.Context) error {
	return m.Registrar().Ready(ctx, func(ctx context.Context) error {
		_, err := m.ask(ctx, http.MethodGet, registrarURL+"/readyz", nil)
		return err
	})
}

// Etcd is etcd's process, the last one that ran; nil: none did.
func (m *Mesh) Etcd() *rig.Proc {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.etcd
}

// Registrar is the registrar's.
func (m *Mesh) Registrar() *rig.Proc {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.registrar
}

func (m *Mesh) startRegistry(ctx context.Context) error {
	if m.Etcd() == nil {
		if err := m.StartEtcd(ctx); err != nil {
			return err
		}
	}
	if m.o.Registry.APIServer != "" && m.APIServer() == nil {
		if err := m.StartAPIServer(ctx); err != nil {
			return err
		}
	}
	if !m.o.DevCA { // the registrar's own, and the nodes'
		for _, account := range []string{"aether-registrar", "aether-agent"} {
			if err := m.Issue(rig.SVIDRequest{Namespace: "aether-system", Account: account}); err != nil {
				return err
			}
		}
	}
	if err := m.StartRegistrar(); err != nil {
		return err
	}
	return m.AwaitRegistrar(ctx)
}

// ask sends a request from the first node and gives the answer's body, of 200 alone.
func (m *Mesh) ask(ctx context.Context, method, url string, body []byte) ([]byte, error) {
	return m.request(ctx, 0, method, url, bytes.NewReader(body))
}

// Row is one of etcd's.
type Row struct {
	Service string // "shop/cart"
	Class   string // "PROTOCOL_HTTP"
	IP      string
	Health  string
}

// healths are the values of the field of contract 9.2.
var healths = []string{"HEALTH_UNSPECIFIED", "HEALTHY", "UNHEALTHY", "DRAINING"}

const healthField = 9 // contract 9.2

// Rows are what etcd has, by key, as its own HTTP interface tells it.
func (m *Mesh) Rows(ctx context.Context) ([]Row, error) {
	const prefix = "/aether/v1/regions/local/clusters/local/ns/" // contract 9.5
	after := prefix[:len(prefix)-1] + "0"                        // the first key behind those of the prefix
	question, err := json.Marshal(map[string]string{
		"key": base64.StdEncoding.EncodeToString([]byte(prefix)), "range_end": base64.StdEncoding.EncodeToString([]byte(after)),
	})
	if err != nil {
		return nil, err
	}
	b, err := m.ask(ctx, http.MethodPost, etcdURL+"/v3/kv/range", question)
	if err != nil {
		return nil, err
	}
	var answer struct {
		Kvs []struct{ Key, Value []byte }
	}
	if err := json.Unmarshal(b, &answer); err != nil {
		return nil, fmt.Errorf("etcd's answer: %w: %.200s", err, b)
	}
	var rows []Row
	for _, kv := range answer.Kvs {
		at := strings.Split(strings.TrimPrefix(string(kv.Key), prefix), "/") // shop services cart protocols PROTOCOL_HTTP endpoints 10.1.1.10
		if len(at) != 7 || at[1] != "services" || at[3] != "protocols" || at[5] != "endpoints" {
			return nil, fmt.Errorf("etcd has a key that is not contract 9.5's: %s", kv.Key)
		}
		h, err := healthOf(kv.Value)
		if err != nil {
			return nil, fmt.Errorf("etcd's row %s: %w", kv.Key, err)
		}
		rows = append(rows, Row{at[0] + "/" + at[2], at[4], at[6], h})
	}
	return rows, nil
}

// Compact has etcd forget its history up to now: a watch that would go on from before is
// refused.
func (m *Mesh) Compact(ctx context.Context) error {
	b, err := m.ask(ctx, http.MethodPost, etcdURL+"/v3/kv/range", []byte(`{"key":"AA=="}`))
	if err != nil {
		return err
	}
	var now struct{ Header struct{ Revision string } }
	if err := json.Unmarshal(b, &now); err != nil {
		return fmt.Errorf("etcd's answer: %w: %.200s", err, b)
	}
	_, err = m.ask(ctx, http.MethodPost, etcdURL+"/v3/kv/compaction", fmt.Appendf(nil, `{"revision":%q}`, now.Header.Revision))
	return err
}

// PutKey writes a key into etcd, as a registrar of elsewhere would; a nil value takes it out.
func (m *Mesh) PutKey(ctx context.Context, key string, value []byte) error {
	what, question := "put", map[string][]byte{"key": []byte(key), "value": value}
	if value == nil {
		what, question = "deleterange", map[string][]byte{"key": []byte(key)}
	}
	b, err := json.Marshal(question)
	if err != nil {
		return err
	}
	_, err = m.ask(ctx, http.MethodPost, etcdURL+"/v3/kv/"+what, b)
	return err
}

// healthOf reads one field of a ServiceEndpoint, by its number.
func healthOf(b []byte) (string, error) {
	var health uint64
	for len(b) > 0 {
		number, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			return "", protowire.ParseError(n)
		}
		b = b[n:]
		if n = protowire.ConsumeFieldValue(number, typ, b); n < 0 {
			return "", protowire.ParseError(n)
		}
		if number == healthField && typ == protowire.VarintType {
			health, _ = protowire.ConsumeVarint(b)
		}
		b = b[n:]
	}
	if health >= uint64(len(healths)) {
		return "", fmt.Errorf("health %d is none", health)
	}
	return healths[health], nil
}

// AwaitRows returns once etcd has exactly these rows of a pod, under whichever classes: all
// of that health, or, of health "", none.
func (m *Mesh) AwaitRows(ctx context.Context, pod *rig.Pod, health string) error {
	return rig.Until(ctx, func(ctx context.Context) error {
		rows, err := m.Rows(ctx)
		if err != nil {
			return err
		}
		rows = slices.DeleteFunc(rows, func(r Row) bool { return r.IP != pod.IP4.String() })
		switch {
		case health == "" && len(rows) > 0, health != "" && len(rows) == 0,
			slices.ContainsFunc(rows, func(r Row) bool { return r.Health != health }):
			return fmt.Errorf("etcd's rows of %s are %v, waited for %q", pod.Name, rows, health)
		}
		return nil
	})
}

// AwaitUsable returns once a node's proxy may send requests to the pod, or, with usable false,
// may not. A node that needs no service of the pod's never may.
func (m *Mesh) AwaitUsable(ctx context.Context, node int, pod *rig.Pod, usable bool) error {
	return rig.Until(ctx, func(ctx context.Context) error {
		b, err := m.Admin(ctx, node, "/snapshot")
		if err != nil {
			return err
		}
		is := false
		for doc := range strings.SplitSeq(string(b), "\n---\n") {
			is = is || strings.Contains(doc, "kind: Pod\n") && strings.Contains(doc, "\n  name: "+pod.Name+"\n") &&
				strings.Contains(doc, "ip: \""+pod.IP4.String()+"\"") && strings.Contains(doc, "type: Ready") && strings.Contains(doc, `status: "True"`)
		}
		if is != usable {
			return fmt.Errorf("that %s may send to %s is %t, waited for %t", m.Rig.Nodes[node].Name, pod.Name, is, usable)
		}
		return nil
	})
}

// AwaitName returns once a node knows that there is a service of that account, in namespace
// shop: it has rows of it, or would ask for them (decision 033).
func (m *Mesh) AwaitName(ctx context.Context, node int, account string) error {
	return rig.Until(ctx, func(ctx context.Context) error {
		b, err := m.Admin(ctx, node, "/snapshot")
		if err != nil {
			return err
		}
		for doc := range strings.SplitSeq(string(b), "\n---\n") {
			if strings.Contains(doc, "kind: ServiceAccount\n") && strings.Contains(doc, "\n  name: "+account+"\n") && strings.Contains(doc, "file.aether.io/catalog: \"true\"") ||
				strings.Contains(doc, "kind: Pod\n") && strings.Contains(doc, "\n  serviceAccountName: "+account+"\n") {
				return nil
			}
		}
		return fmt.Errorf("%s has not heard of service shop/%s", m.Rig.Nodes[node].Name, account)
	})
}

// Terminate has a pod's deletion begin, as a cluster's API would tell: what there is of it
// goes on until RemovePod. Where there is an API server it is deleted there, too.
func (m *Mesh) Terminate(name string) error {
	if err := m.deleteObject(name, 30); err != nil {
		return err
	}
	m.mu.Lock()
	yaml := m.documents[name]
	m.mu.Unlock()
	const before = "\nmetadata:\n"
	if !strings.Contains(yaml, before) {
		return fmt.Errorf("mesh: no pod %s that could be deleted", name)
	}
	return m.Write("pod-"+name, strings.Replace(yaml, before, before+"  deletionTimestamp: \"2026-01-01T00:00:00Z\"\n", 1))
}

// RemovePod takes a pod's document out, as after its end.
func (m *Mesh) RemovePod(name string) error {
	if err := m.deleteObject(name, 0); err != nil {
		return err
	}
	m.mu.Lock()
	delete(m.documents, name)
	m.mu.Unlock()
	return m.Remove("pod-" + name)
}
