package server

import (
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"aether/controlplane/registrar/server/storetest"
	"aether/controlplane/registry"
	"aether/controlplane/registrypb"
	"aether/mtls"
	"aether/mtls/devca"
	"aether/mtls/spiffeid"
)

// trusted is a registrar with TLS, and how identities of its trust domain call it.
type trusted struct {
	*replica
	ca   *devca.CA
	self *mtls.SVID
}

func startTrusted(t *testing.T, store registry.Store, change func(*Config)) *trusted {
	t.Helper()
	ca, err := devca.Open(t.TempDir(), "mesh.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	r := &trusted{ca: ca}
	r.self = r.issue(t, "/ns/aether-system/sa/aether-registrar")
	c := Config{Store: store, TLS: mtls.ServerConfig(mtls.Server{SVID: func() *mtls.SVID { return r.self }, Named: true})}
	change(&c)
	r.replica = start(t, c)
	return r
}

func (r *trusted) issue(t *testing.T, path string) *mtls.SVID {
	t.Helper()
	id, err := spiffeid.Parse("spiffe://mesh.test" + path)
	if err != nil {
		t.Fatal(err)
	}
	svid, err := r.ca.Issue(id, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	return svid
}

func (r *trusted) as(t *testing.T, path string) registrypb.RegistrarServiceClient {
	t.Helper()
	return r.dial(grpc.WithTransportCredentials(credentials.NewTLS(mtls.ClientConfig(mtls.Client{SVID: r.issue(t, path), ALPN: []string{"h2"}, Pin: r.self.ID}))))
}

// TestNodeWritesItsOwn: a caller whose identity names a node registers and removes that
// node's rows alone, whatever it says of itself; one whose identity names none may any.
func TestNodeWritesItsOwn(t *testing.T) {
	store := storetest.New("local", "local")
	r := startTrusted(t, store, func(c *Config) {
		c.Node = func(id spiffeid.ID) string {
			node, _ := registry.NodeOf(id, "mesh.test", "/node/{node}")
			return node
		}
	})
	a, b, agent := r.as(t, "/node/node-a"), r.as(t, "/node/node-b"), r.as(t, "/ns/aether-system/sa/aether-agent")
	add := func(c registrypb.RegistrarServiceClient, ip, node string) codes.Code {
		_, err := c.RegisterEndpoint(t.Context(), &registrypb.RegisterEndpointRequest{ServiceName: "shop/cart", Endpoint: storetest.HTTP(ip, node)})
		return status.Code(err)
	}
	type removal struct {
		node   string
		stated uint64
	}
	remove := func(c registrypb.RegistrarServiceClient, by removal, ip string) codes.Code {
		_, err := c.UnregisterEndpoint(t.Context(), &registrypb.UnregisterEndpointRequest{ServiceName: "shop/cart", Ips: []string{ip}, NodeName: by.node, Stated: by.stated})
		return status.Code(err)
	}
	for _, tt := range []struct {
		who  string
		c    registrypb.RegistrarServiceClient
		node string
		want codes.Code
	}{
		{"node-a of itself", a, "node-a", codes.OK},
		{"node-a of node-b", a, "node-b", codes.PermissionDenied},
		{"node-a of nobody", a, "", codes.PermissionDenied},
		{"an agent of node-c", agent, "node-c", codes.OK},
	} {
		if got := add(tt.c, "10.0.0.1", tt.node); got != tt.want {
			t.Errorf("a row, %s: %s, want %s", tt.who, got, tt.want)
		}
	}
	if got := add(b, "10.0.0.2", "node-b"); got != codes.OK {
		t.Fatal(got)
	}
	for _, tt := range []struct {
		by    removal
		want  codes.Code
		stays bool
	}{
		{removal{}, codes.OK, true}, // it is node-a's word, whoever it says it is
		{removal{"node-a", 0}, codes.OK, true},
		{removal{"node-a", 1 << 40}, codes.OK, true},
		{removal{"node-a", 1<<64 - 1}, codes.OK, true},
		{removal{"node-b", 1 << 40}, codes.PermissionDenied, true},
		{removal{"node-b", 0}, codes.PermissionDenied, true},
	} {
		if got := remove(a, tt.by, "10.0.0.2"); got != tt.want {
			t.Errorf("a removal by node-a of node-b's row, %+v: %s, want %s", tt.by, got, tt.want)
		}
		if stays := rowOf(r.Server, cart, "10.0.0.2") != nil; stays != tt.stays {
			t.Errorf("after the removal by node-a, %+v: the row is there: %t", tt.by, stays)
		}
	}
	if got := remove(b, removal{}, "10.0.0.2"); got != codes.OK || rowOf(r.Server, cart, "10.0.0.2") != nil {
		t.Errorf("node-b cannot remove its own row: %s", got)
	}
	if got := remove(agent, removal{}, "10.0.0.1"); got != codes.OK || rowOf(r.Server, cart, "10.0.0.1") != nil {
		t.Errorf("an agent whose identity names no node cannot remove a row: %s", got)
	}
	if r.refused[otherNode].Value() != 2 || r.denied.Value() != 2 {
		t.Errorf("%d rows refused, %d removals denied, want 2 and 2", r.refused[otherNode].Value(), r.denied.Value())
	}
}

// TestIdentityOfRows: neither a node nor whoever writes to the store makes a registrar tell
// of an identity that the service's rows may not name.
func TestIdentityOfRows(t *testing.T) {
	row := func(ip, id string) *registrypb.ServiceEndpoint {
		e := storetest.HTTP(ip, "node-a")
		e.SpiffeId = id
		return e
	}
	for name, domain := range map[string]string{"of the configuration": "mesh.test", "of the caller": ""} {
		t.Run("trust domain "+name, func(t *testing.T) {
			store := storetest.New("local", "local")
			r := startTrusted(t, store, func(c *Config) { c.TrustDomain, c.Identities = domain, []string{"/app/*"} })
			c := r.as(t, "/ns/aether-system/sa/aether-agent")
			for id, want := range map[string]codes.Code{
				"":                                    codes.OK,
				"spiffe://mesh.test/ns/shop/sa/other": codes.OK,
				"spiffe://mesh.test/app/cart":         codes.OK,
				"spiffe://mesh.test/ns/evil/sa/evil":  codes.PermissionDenied,
				"spiffe://evil.test/ns/shop/sa/cart":  codes.PermissionDenied,
				"spiffe://evil.test/app/cart":         codes.PermissionDenied,
			} {
				_, err := c.RegisterEndpoint(t.Context(), &registrypb.RegisterEndpointRequest{ServiceName: "shop/cart", Endpoint: row("10.0.0.1", id)})
				if status.Code(err) != want {
					t.Errorf("%q: %v, want %s", id, err, want)
				}
			}
			if n := r.refused[registry.ForeignIdentity].Value(); n != 3 {
				t.Errorf("%d refused, want 3", n)
			}
		})
	}
	store := storetest.New("local", "local")
	rows := storetest.Rows("local", "local", cart, row("10.0.0.1", "spiffe://mesh.test/app/cart"))
	store.Set(append(rows, storetest.Rows("west", "local", cart, row("10.0.0.2", "spiffe://mesh.test/ns/evil/sa/evil"))...)...)
	r := startTrusted(t, store, func(c *Config) { c.TrustDomain, c.Identities = "mesh.test", []string{"/app/*"} })
	<-r.Synced()
	store.Set(storetest.Rows("west", "local", cart, row("10.0.0.1", "spiffe://evil.test/app/cart"))...)
	eventually(t, "both to be left out", func() bool { return r.unencodable.Value() == 2 })
	if !sameAs(r.Server, rows) {
		t.Errorf("%+v, want the one row", r.Status())
	}
}
