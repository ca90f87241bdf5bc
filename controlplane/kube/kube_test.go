package kube_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"aether/controlplane/input"
	"aether/controlplane/kube"
	"aether/dataplane/model"
	"aether/e2e/cluster/apiserver"
	"aether/e2e/rig"
)

// requests are what a source asked for, as RBAC sees it.
type requests struct {
	mu   sync.Mutex
	seen map[string]bool // "list apiextensions.k8s.io/customresourcedefinitions"
	old  bool            // lists as streams are refused, as by an older server
}

// wrap has a configuration's requests recorded.
func (r *requests) wrap(c *rest.Config) *rest.Config {
	r.seen = map[string]bool{}
	c.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(q *http.Request) (*http.Response, error) {
			parts := strings.Split(strings.Trim(q.URL.Path, "/"), "/")
			group := ""
			switch {
			case len(parts) == 3 && parts[0] == "api":
			case len(parts) == 4 && parts[0] == "apis":
				group = parts[1]
			default:
				group = "odd: " + q.URL.Path
			}
			verb := strings.ToLower(q.Method)
			if verb == "get" {
				verb = "list"
				if q.URL.Query().Get("watch") != "" {
					verb = "watch"
				}
			}
			r.mu.Lock()
			r.seen[verb+" "+group+"/"+parts[len(parts)-1]] = true
			r.mu.Unlock()
			if r.old && q.URL.Query().Get("sendInitialEvents") != "" {
				return &http.Response{StatusCode: http.StatusUnprocessableEntity, Status: "422", Header: http.Header{}, Body: http.NoBody, Request: q}, nil
			}
			return next.RoundTrip(q)
		})
	})
	return c
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(q *http.Request) (*http.Response, error) { return f(q) }

// server is an API server with a client of an administrator.
type server struct {
	*apiserver.Server
	objects dynamic.Interface
}

// resources of the kinds that tests make.
var resources = map[string]schema.GroupVersionResource{}

func init() {
	for kind, r := range map[string]string{
		"Service": "/v1/services", "EndpointSlice": "discovery.k8s.io/v1/endpointslices", "ClusterRole": "rbac.authorization.k8s.io/v1/clusterroles",
		"HTTPRoute": "gateway.networking.k8s.io/v1/httproutes", "GRPCRoute": "gateway.networking.k8s.io/v1/grpcroutes",
		"TCPRoute": "gateway.networking.k8s.io/v1/tcproutes", "TLSRoute": "gateway.networking.k8s.io/v1/tlsroutes",
		"UDPRoute": "gateway.networking.k8s.io/v1/udproutes", "ReferenceGrant": "gateway.networking.k8s.io/v1/referencegrants",
		"HTTPFilter": "config.aether.io/v1/httpfilters", "EndpointPolicy": "config.aether.io/v1/endpointpolicies", "MeshConfig": "config.aether.io/v1/meshconfigs",
		"CustomResourceDefinition": "apiextensions.k8s.io/v1/customresourcedefinitions",
	} {
		p := strings.Split(r, "/")
		resources[kind] = schema.GroupVersionResource{Group: p[0], Version: p[1], Resource: p[2]}
	}
}

func start(t *testing.T) *server {
	s := &server{Server: apiserver.Start(t)}
	var err error
	if s.objects, err = dynamic.NewForConfig(s.Config()); err != nil {
		t.Fatal(err)
	}
	return s
}

// resource is where an object is written.
func (s *server) resource(o *unstructured.Unstructured) dynamic.ResourceInterface {
	r := s.objects.Resource(resources[o.GetKind()])
	if o.GetNamespace() == "" {
		return r
	}
	return r.Namespace(o.GetNamespace())
}

// parse reads an object, of which the first line may be short: "HTTPRoute shop/r".
func (s *server) parse(t *testing.T, text string) *unstructured.Unstructured {
	t.Helper()
	head, rest, _ := strings.Cut(strings.TrimSpace(text), "\n")
	u := map[string]any{}
	if kind, name, ok := strings.Cut(head, " "); ok && resources[kind].Version != "" {
		r := resources[kind]
		ns, n, _ := strings.Cut(name, "/")
		text = fmt.Sprintf("apiVersion: %s\nkind: %s\nmetadata: {namespace: %s, name: %s}\n%s", strings.TrimPrefix(r.Group+"/"+r.Version, "/"), kind, ns, n, rest)
	}
	if err := yaml.Unmarshal([]byte(text), &u); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return &unstructured.Unstructured{Object: u}
}

// try writes an object, new or changed.
func (s *server) try(t *testing.T, text string) error {
	t.Helper()
	o := s.parse(t, text)
	_, err := s.resource(o).Apply(t.Context(), o.GetName(), o, metav1.ApplyOptions{FieldManager: "test", Force: true})
	return err
}

func (s *server) apply(t *testing.T, text string) {
	t.Helper()
	if err := s.try(t, text); err != nil {
		t.Fatal(err)
	}
}

func (s *server) delete(t *testing.T, kind, ns, name string) {
	t.Helper()
	if err := s.objects.Resource(resources[kind]).Namespace(ns).Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
}

// crds installs the CRDs of files, and waits until they are served.
func (s *server) crds(t *testing.T, files ...string) {
	t.Helper()
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		s.apply(t, string(b))
	}
	for _, f := range files {
		b, _ := os.ReadFile(f)
		o := s.parse(t, string(b))
		spec := o.Object["spec"].(map[string]any)
		r := schema.GroupVersionResource{Group: spec["group"].(string), Version: "v1", Resource: spec["names"].(map[string]any)["plural"].(string)}
		s.until(t, f, func(ctx context.Context) error {
			_, err := s.objects.Resource(r).List(ctx, metav1.ListOptions{Limit: 1})
			return err
		})
	}
}

func (s *server) until(t *testing.T, what string, f func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := rig.Until(ctx, f); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// gatewayCRDs are the Gateway API's, as released.
func gatewayCRDs(t *testing.T) (out []string) {
	dir, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/gateway-api").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range []string{"httproutes", "grpcroutes", "tcproutes", "tlsroutes", "udproutes", "referencegrants"} {
		out = append(out, filepath.Join(strings.TrimSpace(string(dir)), "config/crd/standard/gateway.networking.k8s.io_"+r+".yaml"))
	}
	return out
}

// role reads rbac.yaml.
func role(t *testing.T) *rbacv1.ClusterRole {
	t.Helper()
	b, err := os.ReadFile("rbac.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var r rbacv1.ClusterRole
	if err := yaml.UnmarshalStrict(b, &r); err != nil {
		t.Fatal(err)
	}
	return &r
}

// as is the configuration of a ServiceAccount that has a role and nothing else.
func (s *server) as(t *testing.T, r *rbacv1.ClusterRole) *rest.Config {
	t.Helper()
	ns := s.Namespace(t)
	s.Account(t, ns, "proxy")
	c := s.Client(t).RbacV1()
	r.Name += "-" + ns
	if _, err := c.ClusterRoles().Create(t.Context(), r, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: r.Name}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: r.Name},
		Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: ns, Name: "proxy"}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	return s.As(t, ns, "proxy")
}

// TestSource is the life of a source on one real API server, with the role of rbac.yaml.
func TestSource(t *testing.T) {
	s := start(t)
	var asked requests
	config, err := kube.Connect(apiserver.Kubeconfig(t, s.as(t, role(t))))
	if err != nil {
		t.Fatal(err)
	}
	src, got := run(t, asked.wrap(config), "mesh-system")
	ns, other := s.Namespace(t), s.Namespace(t)
	if _, err := s.Client(t).CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "mesh-system"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	name := func(n string) model.ServiceName { return model.ServiceName{Namespace: ns, Name: n} }
	fill := func(text string) string { return strings.NewReplacer("NS", ns, "OTHER", other).Replace(text) }

	t.Run("no CRD is installed", func(t *testing.T) {
		got.wait(t, "synced", func(_ *input.Batch, st input.Status) string {
			if !st.Connected {
				return st.Err
			}
			return ""
		})
		for _, k := range src.Kinds() {
			if want := k.Kind != "Service" && k.Kind != "EndpointSlice"; k.Inert != want || k.Err != "" {
				t.Errorf("%+v", k)
			}
		}
	})
	t.Run("Services", func(t *testing.T) {
		s.apply(t, fill("Service NS/cart\nspec: {clusterIP: 10.96.1.1, ports: [{name: web, port: 80, targetPort: 8080}]}"))
		s.apply(t, fill("apiVersion: v1\nkind: Service\nmetadata: {namespace: NS, name: made, labels: {aether.io/mesh-service: \"true\"}}\nspec: {clusterIP: 10.96.1.2, ports: [{name: p8080-tcp, port: 8080, appProtocol: http}, {name: mesh, port: 18081}]}"))
		got.wait(t, "both", func(b *input.Batch, _ input.Status) string {
			cart, made := b.Services[name("cart")], b.Services[name("made")]
			want := "[{" + ns + "/cart [10.96.1.1] false [{web 80 8080  false none}]}] [{" + ns + "/made [10.96.1.2] true [{p8080-tcp 8080 8080  false http} {mesh 18081 18081  false none}]}]"
			if have := fmt.Sprint(cart, " ", made); have != want {
				return have + ", want " + want
			}
			return ""
		})
		s.apply(t, fill("Service NS/cart\nspec: {clusterIP: 10.96.1.1, ports: [{name: web, port: 80, targetPort: 9090}]}"))
		got.wait(t, "changed", func(b *input.Batch, _ input.Status) string {
			if c := b.Services[name("cart")]; len(c) != 1 || c[0].Ports[0].Target != 9090 {
				return fmt.Sprint(c)
			}
			return ""
		})
		s.delete(t, "Service", ns, "made")
		got.wait(t, "deleted", func(b *input.Batch, _ input.Status) string { return gone(b.Services[name("made")]) })
	})
	t.Run("CRDs come", func(t *testing.T) {
		s.crds(t, append(gatewayCRDs(t), ownCRDs(t)...)...)
		s.until(t, "all kinds are alive", func(context.Context) error {
			for _, k := range src.Kinds() {
				if k.Kind != "EndpointSlice" && (!k.Listed || k.Inert || k.Version == "") {
					return fmt.Errorf("%+v", k)
				}
			}
			return nil
		})
	})
	t.Run("routes", func(t *testing.T) {
		for _, r := range []struct {
			kind model.RouteKind
			spec string
		}{{model.HTTPRoute, ""}, {model.GRPCRoute, ""}, {model.TCPRoute, ""}, {model.TLSRoute, "hostnames: [a.example], "}} {
			key := input.RouteKey{Kind: r.kind, Namespace: ns, Name: "r"}
			route := func(port int) string {
				return fill(fmt.Sprintf("%s NS/r\nspec: {%sparentRefs: [{kind: Service, group: \"\", name: cart}], rules: [{backendRefs: [{name: cart, port: %d}]}]}", r.kind, r.spec, port))
			}
			s.apply(t, route(80))
			for _, port := range []uint16{80, 81} {
				if port == 81 {
					s.apply(t, route(81))
				}
				got.wait(t, fmt.Sprint(r.kind, " to ", port), func(b *input.Batch, _ input.Status) string {
					if x := b.Routes[key]; len(x) != 1 || len(x[0].Rules) != 1 || len(x[0].Rules[0].Backends) != 1 || x[0].Rules[0].Backends[0].Port != port || x[0].Rules[0].Invalid != "" || x[0].Created.IsZero() {
						return fmt.Sprint(x)
					}
					return ""
				})
			}
			s.delete(t, r.kind.String(), ns, "r")
			got.wait(t, "deleted", func(b *input.Batch, _ input.Status) string { return gone(b.Routes[key]) })
		}
		// The API server writes a group where none was; it is core's that was meant.
		s.apply(t, fill("HTTPRoute NS/ungrouped\nspec: {parentRefs: [{kind: Service, name: cart}], rules: [{backendRefs: [{name: cart, port: 80}]}]}"))
		s.apply(t, fill("HTTPRoute NS/gateway\nspec: {parentRefs: [{name: gw}], rules: [{backendRefs: [{name: cart, port: 80}]}]}"))
		got.wait(t, "of the Service", func(b *input.Batch, _ input.Status) string {
			if len(b.Routes[input.RouteKey{Kind: model.HTTPRoute, Namespace: ns, Name: "ungrouped"}]) != 1 || len(b.Routes) != 1 {
				return fmt.Sprint(b.Routes)
			}
			return ""
		})
		s.delete(t, "HTTPRoute", ns, "ungrouped")
		s.delete(t, "HTTPRoute", ns, "gateway")
	})
	t.Run("UDPRoute is inert", func(t *testing.T) {
		s.apply(t, fill("UDPRoute NS/u\nspec: {parentRefs: [{kind: Service, group: \"\", name: cart}], rules: [{backendRefs: [{name: cart, port: 53}]}]}"))
		got.wait(t, "said", problem(fill("UDPRoute NS/u"), "UDP is not carried yet"))
		s.delete(t, "UDPRoute", ns, "u")
		got.wait(t, "taken back", problem(fill("UDPRoute NS/u"), ""))
	})
	t.Run("ReferenceGrant", func(t *testing.T) {
		s.apply(t, fill("HTTPRoute NS/far\nspec: {parentRefs: [{kind: Service, group: \"\", name: cart}], rules: [{backendRefs: [{name: pg, namespace: OTHER, port: 80}]}]}"))
		backend := func(want string) func(b *input.Batch, _ input.Status) string {
			return func(b *input.Batch, _ input.Status) string {
				x := b.Routes[input.RouteKey{Kind: model.HTTPRoute, Namespace: ns, Name: "far"}]
				if len(x) != 1 || !strings.HasPrefix(x[0].Rules[0].Backends[0].Invalid, want) || want == "" && x[0].Rules[0].Backends[0].Invalid != "" {
					return fmt.Sprint(x)
				}
				return ""
			}
		}
		got.wait(t, "without", backend("RefNotPermitted"))
		s.apply(t, fill("ReferenceGrant OTHER/g\nspec: {from: [{group: gateway.networking.k8s.io, kind: HTTPRoute, namespace: NS}], to: [{group: \"\", kind: Service, name: pg}]}"))
		got.wait(t, "with", backend(""))
		s.apply(t, fill("ReferenceGrant OTHER/g\nspec: {from: [{group: gateway.networking.k8s.io, kind: HTTPRoute, namespace: NS}], to: [{group: \"\", kind: Service, name: mysql}]}"))
		got.wait(t, "with another", backend("RefNotPermitted"))
		s.apply(t, fill("ReferenceGrant OTHER/g\nspec: {from: [{group: gateway.networking.k8s.io, kind: HTTPRoute, namespace: NS}], to: [{group: \"\", kind: Service}]}"))
		got.wait(t, "with all", backend(""))
		s.delete(t, "ReferenceGrant", other, "g")
		got.wait(t, "without again", backend("RefNotPermitted"))
		s.delete(t, "HTTPRoute", ns, "far")
	})
	t.Run("port map", func(t *testing.T) { portMap(t, s, got, src, ns) })
	t.Run("HTTPFilter", func(t *testing.T) {
		s.apply(t, fill("HTTPFilter NS/f\nspec: {scope: SCOPE_CHAIN, targetRefs: [{kind: Service, name: cart}], rbac: {action: DENY, policies: [{name: p, principals: [{namespace: ops}], permissions: [{pathPrefix: /admin}]}]}}"))
		filter := func(why func(f model.HTTPFilter) bool) func(*input.Batch, input.Status) string {
			return func(b *input.Batch, _ input.Status) string {
				if f := b.Filters[name("f")]; len(f) != 1 || f[0].Invalid != "" || !why(f[0]) {
					return fmt.Sprintf("%+v", f)
				}
				return ""
			}
		}
		got.wait(t, "rbac", filter(func(f model.HTTPFilter) bool {
			return f.Scope == model.ScopeChain && f.RBAC != nil && f.RBAC.Deny && f.RBAC.Policies[0].Permissions[0].PathPrefix == "/admin"
		}))
		s.delete(t, "HTTPFilter", ns, "f")
		s.apply(t, fill(`HTTPFilter NS/f
spec:
  filter: envoy.filters.http.header_mutation
  typedConfig:
    "@type": type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3.HeaderMutation
    mutations: {request_mutations: [{append: {header: {key: x-a, value: "1"}}}]}
`))
		got.wait(t, "mutation", filter(func(f model.HTTPFilter) bool {
			return f.Mutation != nil && len(f.Mutation.Request) == 1 && f.Mutation.Request[0].Name == "x-a"
		}))
	})
	t.Run("MeshConfig", func(t *testing.T) {
		settings := func(want input.Settings) func(*input.Batch, input.Status) string {
			return func(b *input.Batch, _ input.Status) string {
				if b.Settings == nil || *b.Settings != want {
					return fmt.Sprintf("%+v", b.Settings)
				}
				return ""
			}
		}
		flags := input.Settings{AccessLogSuccess: 100}
		got.wait(t, "flags", settings(flags))
		s.apply(t, "MeshConfig mesh-system/default\nspec: {routeSemantics: GatewayAPI, sameNode: inProcess, hopSource: node, proxy: {accessLogsEnabled: true, accessLogSuccessSampleRate: 5, tracingEnabled: true, traceSampleRate: 0.25, emitStatsPod: true}}")
		got.wait(t, "all of it", settings(input.Settings{Semantics: model.GatewayAPI, SameNode: model.InProcess, HopFromNode: true, AccessLogs: true, AccessLogSuccess: 5, Tracing: true, TraceSample: 0.25, EmitStatsPod: true}))
		s.apply(t, "MeshConfig mesh-system/default\nspec: {proxy: {accessLogsEnabled: true}}")
		flags.AccessLogs = true
		got.wait(t, "a part", settings(flags))
		s.apply(t, fill("MeshConfig NS/default\nspec: {routeSemantics: GatewayAPI, proxy: {emitStatsPod: true}}"))
		got.wait(t, "a namespace's", func(b *input.Batch, st input.Status) string {
			if o := b.Namespaces[ns]; len(o) != 1 || o[0].EmitStatsPod == nil || !*o[0].EmitStatsPod || o[0].AccessLogs != nil {
				return fmt.Sprintf("%+v", b.Namespaces)
			}
			return problem(fill("MeshConfig NS/default"), "spec.routeSemantics is of the whole mesh: MeshConfig mesh-system/default has it")(b, st)
		})
		got.wait(t, "and not the mesh's", settings(flags))
		s.delete(t, "MeshConfig", ns, "default")
		got.wait(t, "a namespace's, gone", func(b *input.Batch, _ input.Status) string { return gone(b.Namespaces[ns]) })
		s.delete(t, "MeshConfig", "mesh-system", "default")
		flags.AccessLogs = false
		got.wait(t, "gone", settings(flags))
	})
	t.Run("EndpointPolicy", func(t *testing.T) {
		s.apply(t, fill("EndpointPolicy NS/e\nspec: {targetRef: {kind: Service, name: cart}, udsSocket: app/http.sock}"))
		is := func(want string) func(*input.Batch, input.Status) string {
			return func(b *input.Batch, _ input.Status) string {
				have := ""
				for _, p := range b.Policies[model.ServiceName{Namespace: ns, Name: "cart"}] {
					have += p.Name + " " + p.UDSSocket
				}
				if have != want {
					return fmt.Sprintf("in force is %q", have)
				}
				return ""
			}
		}
		got.wait(t, "in force", is("e app/http.sock"))
		s.apply(t, fill("EndpointPolicy NS/d\nspec: {targetRef: {kind: Service, name: cart}, udsSocket: app/d.sock}"))
		got.wait(t, "the first by name", is("d app/d.sock"))
		got.wait(t, "and the other is told", problem(fill("EndpointPolicy NS/e"), fill("EndpointPolicy NS/d is for the same Service and comes first by name")))
		s.delete(t, "EndpointPolicy", ns, "d")
		got.wait(t, "the other again", is("e app/http.sock"))
		s.delete(t, "EndpointPolicy", ns, "e")
		got.wait(t, "gone", is(""))
	})
	t.Run("admission", func(t *testing.T) { admission(t, s, ns) })
	t.Run("a status written is no change", func(t *testing.T) {
		s.apply(t, fill("HTTPRoute NS/st\nspec: {parentRefs: [{kind: Service, group: \"\", name: cart}], rules: [{backendRefs: [{name: cart, port: 80}]}]}"))
		key := input.RouteKey{Kind: model.HTTPRoute, Namespace: ns, Name: "st"}
		got.wait(t, "there", func(b *input.Batch, _ input.Status) string {
			if len(b.Routes[key]) != 1 {
				return "not there"
			}
			return ""
		})
		events := src.Events.Value()
		got.mu.Lock()
		changed := got.changed
		got.mu.Unlock()
		o := s.parse(t, fill(`HTTPRoute NS/st
status: {parents: [{parentRef: {kind: Service, group: "", name: cart}, controllerName: gateway.aether.io/mesh, conditions: [{type: Accepted, status: "True", reason: Accepted, message: "", lastTransitionTime: "2026-10-01T08:00:00Z"}]}]}`))
		if _, err := s.objects.Resource(resources["HTTPRoute"]).Namespace(ns).ApplyStatus(t.Context(), "st", o, metav1.ApplyOptions{FieldManager: "status"}); err != nil {
			t.Fatal(err)
		}
		s.until(t, "it came", func(context.Context) error {
			if src.Events.Value() == events {
				return errors.New("no event")
			}
			return nil
		})
		select {
		case <-changed:
			t.Error("the sink was told of a status")
		default:
		}
		s.delete(t, "HTTPRoute", ns, "st")
	})
	t.Run("a CRD goes and comes back", func(t *testing.T) {
		crds := s.objects.Resource(resources["CustomResourceDefinition"])
		if err := crds.Delete(t.Context(), "httpfilters.config.aether.io", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		got.wait(t, "its objects are gone", func(b *input.Batch, _ input.Status) string { return gone(b.Filters[name("f")]) })
		s.until(t, "inert", func(context.Context) error {
			if k := kindOf(src, "HTTPFilter"); !k.Inert || k.Objects != 0 {
				return fmt.Errorf("%+v", k)
			}
			return nil
		})
		s.crds(t, "crd/config.aether.io_httpfilters.yaml")
		s.apply(t, fill("HTTPFilter NS/f\nspec: {extAuthz: {disabled: true}}"))
		got.wait(t, "alive again", func(b *input.Batch, st input.Status) string {
			if f := b.Filters[name("f")]; len(f) != 1 || f[0].ExtAuthz == nil || !st.Connected {
				return fmt.Sprintf("%+v, %+v", f, st)
			}
			return ""
		})
	})
	t.Run("the server is away", func(t *testing.T) {
		s.Kill(t)
		got.wait(t, "known to be away", func(b *input.Batch, st input.Status) string {
			if st.Connected || st.Err == "" {
				return "connected"
			}
			return there(b, name("cart"), name("f"))
		})
		s.Restart(t)
		s.apply(t, fill("Service NS/late\nspec: {clusterIP: 10.96.1.9, ports: [{name: web, port: 80}]}"))
		got.wait(t, "back", func(b *input.Batch, st input.Status) string {
			if len(b.Services[name("late")]) != 1 || !st.Connected {
				return fmt.Sprintf("%v, %+v", b.Services[name("late")], st)
			}
			return there(b, name("cart"), name("f"))
		})
	})
	t.Run("history is compacted", func(t *testing.T) {
		s.Kill(t)
		// While nobody is told: one object goes, and the past with it.
		if r, err := s.Etcd().Client().Delete(t.Context(), "/registry/services/specs/"+ns+"/late"); err != nil || r.Deleted != 1 {
			t.Fatal(r, err)
		}
		s.Compact(t)
		s.Restart(t)
		got.wait(t, "what went meanwhile is gone, and nothing else", func(b *input.Batch, st input.Status) string {
			if !st.Connected {
				return st.Err
			}
			return gone(b.Services[name("late")]) + there(b, name("cart"), name("f"))
		})
	})
	t.Run("the role is what is asked for", func(t *testing.T) {
		may := map[string]bool{}
		for _, rule := range role(t).Rules {
			for _, g := range rule.APIGroups {
				for _, r := range rule.Resources {
					for _, v := range rule.Verbs {
						may[v+" "+g+"/"+r] = true
					}
				}
			}
		}
		asked.mu.Lock()
		for a := range asked.seen {
			if !may[a] {
				t.Errorf("%s is asked for, and rbac.yaml does not allow it", a)
			}
		}
		asked.mu.Unlock()
		// Where lists do not come as streams, all of it is needed.
		s.apply(t, fill("Service NS/named\nspec: {clusterIP: 10.96.1.8, ports: [{name: web, port: 80, targetPort: http}]}"))
		older := requests{old: true}
		src, got := run(t, older.wrap(s.as(t, role(t))), "mesh-system")
		got.wait(t, "an older server", func(b *input.Batch, st input.Status) string {
			if !st.Connected || len(b.Services[name("named")]) != 1 {
				return st.Err
			}
			return there(b, name("cart"), name("f"))
		})
		s.until(t, "everything is asked for", func(context.Context) error {
			older.mu.Lock()
			defer older.mu.Unlock()
			if !maps.Equal(may, older.seen) {
				return fmt.Errorf("rbac.yaml allows\n%s\nand asked for was\n%s\n%+v", strings.Join(slices.Sorted(maps.Keys(may)), "\n"), strings.Join(slices.Sorted(maps.Keys(older.seen)), "\n"), src.Kinds())
			}
			return nil
		})
	})
	got.mu.Lock()
	defer got.mu.Unlock()
	if got.replaced != 1 {
		t.Errorf("%d whole states were said, the first is enough", got.replaced)
	}
}

// there says what is not there of a Service and an HTTPFilter.
func there(b *input.Batch, service, filter model.ServiceName) string {
	if len(b.Services[service]) != 1 || len(b.Filters[filter]) != 1 {
		return fmt.Sprintf("lost: %v %v", b.Services[service], b.Filters[filter])
	}
	return ""
}

// problem waits for a problem of an object; empty: for none.
func problem(object, reason string) func(*input.Batch, input.Status) string {
	return func(b *input.Batch, _ input.Status) string {
		have := b.Problems[object]
		if reason == "" && len(have) > 0 || reason != "" && !slices.ContainsFunc(have, func(p model.Problem) bool { return p.Object == object && strings.Contains(p.Reason, reason) }) {
			return fmt.Sprint(object, " has ", have)
		}
		return ""
	}
}

// portMap: contract 4.10 on real EndpointSlices; cases 146 and 147.
func portMap(t *testing.T, s *server, got *sink, src *kube.Source, ns string) {
	svc := model.ServiceName{Namespace: ns, Name: "user"}
	ports := func(want, why string) func(*input.Batch, input.Status) string {
		return func(b *input.Batch, _ input.Status) string {
			var have []uint16
			if x := b.Services[svc]; len(x) == 1 {
				for _, p := range x[0].Ports {
					have = append(have, p.Target)
				}
			}
			if fmt.Sprint(have) != want {
				return fmt.Sprint(have, ", want ", want)
			}
			return problem("Service "+svc.String(), why)(b, input.Status{})
		}
	}
	slice := func(name string, ready bool, ports string) string {
		return fmt.Sprintf("apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {namespace: %s, name: %s, labels: {kubernetes.io/service-name: user}}\naddressType: IPv4\nendpoints: [{addresses: [10.0.0.1], conditions: {ready: %v}}]\nports: %s", ns, name, ready, ports)
	}
	if k := kindOf(src, "EndpointSlice"); k.Listed || k.Objects != 0 {
		t.Errorf("EndpointSlices are read and nobody needs them: %+v", k)
	}
	s.apply(t, slice("other", true, "[{name: web, port: 1111}]"))
	s.apply(t, strings.ReplaceAll(slice("strange", true, "[{name: web, port: 1111}]"), "service-name: user", "service-name: cart"))
	s.delete(t, "EndpointSlice", ns, "other")
	s.apply(t, "Service "+svc.String()+"\nspec: {clusterIP: 10.96.2.1, ports: [{name: web, port: 80, targetPort: http}, {name: m, port: 81, targetPort: metrics}, {name: num, port: 82, targetPort: 8082}]}")
	got.wait(t, "no slice", ports("[0 0 8082]", `port 80: targetPort "http" names nothing: no EndpointSlice of the Service has the port`))
	s.apply(t, slice("a", true, "[{name: web, port: 8080}]"))
	s.apply(t, slice("b", true, "[{name: m, port: 9100}]"))
	got.wait(t, "split by port, case 147", ports("[8080 9100 8082]", ""))
	s.apply(t, slice("c", false, "[{name: web, port: 8081}]"))
	got.wait(t, "pods disagree, case 147", ports("[0 9100 8082]", "the Service's pods disagree, 8080 and 8081"))
	s.apply(t, slice("c", false, "[{name: web, port: 8080}]"))
	got.wait(t, "they agree; unready pods make no endpoint, case 146", ports("[8080 9100 8082]", ""))
	s.delete(t, "EndpointSlice", ns, "b")
	got.wait(t, "a slice went", ports("[8080 0 8082]", `port 81: targetPort "metrics" names nothing`))
	if k := kindOf(src, "EndpointSlice"); k.Objects != 2 {
		t.Errorf("slices of others are kept: %+v", k)
	}
	s.delete(t, "Service", ns, "user")
	got.wait(t, "deleted", func(b *input.Batch, _ input.Status) string { return gone(b.Services[svc]) })
	s.until(t, "slices are forgotten", func(context.Context) error {
		if k := kindOf(src, "EndpointSlice"); k.Objects != 0 || k.Listed {
			return fmt.Errorf("%+v", k)
		}
		return nil
	})
}

// admission: what the CRDs refuse, and in which words; and that they take what is right.
func admission(t *testing.T, s *server, ns string) {
	policy := func(principal, permission string) string {
		return "{rbac: {policies: [{name: p, principals: [" + principal + "], permissions: [" + permission + "]}]}}"
	}
	for _, tt := range []struct{ kind, name, spec, want string }{
		{"HTTPFilter", "x", "{}", "write exactly one of rbac, extAuthz, headerToMetadata, and filter with typedConfig"},
		{"HTTPFilter", "x", "{rbac: {}, extAuthz: {}}", "write exactly one of rbac, extAuthz, headerToMetadata, and filter with typedConfig"},
		{"HTTPFilter", "x", "{rbac: {}, filter: envoy.filters.http.header_mutation, typedConfig: {}}", "write exactly one of"},
		{"HTTPFilter", "x", "{filter: envoy.filters.http.header_mutation}", "filter and typedConfig go together"},
		{"HTTPFilter", "x", "{filter: envoy.filters.http.lua, typedConfig: {a: 1}}", "there is no Envoy here"},
		{"HTTPFilter", "x", "{scope: SCOPE_INBOUND, targetRefs: [{kind: Service, name: cart}], headerToMetadata: {rules: [{header: x-v, metadataKey: v}]}}", "SCOPE_INBOUND is for rbac and extAuthz"},
		{"HTTPFilter", "x", "{scope: SCOPE_CHAIN, rbac: {}}", "name one at least"},
		{"HTTPFilter", "x", "{scope: SCOPE_ALL, rbac: {}}", `supported values: "SCOPE_UNSPECIFIED", "SCOPE_ROUTE", "SCOPE_CHAIN", "SCOPE_INBOUND"`},
		{"HTTPFilter", "x", "{targetRefs: [{kind: Pod, name: cart}], rbac: {}}", "the target must be a Service"},
		{"HTTPFilter", "x", "{targetRefs: [{group: apps, kind: Service, name: cart}], rbac: {}}", "the target must be a Service"},
		{"HTTPFilter", "x", policy("", ""), "should have at least 1 items"},
		{"HTTPFilter", "x", policy("{spiffeId: 'spiffe://a/b', namespace: ops}", ""), "write exactly one of spiffeId and namespace"},
		{"HTTPFilter", "x", policy("{}", ""), "write exactly one of spiffeId and namespace"},
		{"HTTPFilter", "x", policy("{spiffeId: 'https://a'}", ""), "write a whole SPIFFE ID"},
		{"HTTPFilter", "x", policy("{namespace: ops}", "{}"), "write exactly one of pathPrefix and method"},
		{"HTTPFilter", "x", policy("{namespace: ops}", "{method: get}"), "methods are written in capitals"},
		{"HTTPFilter", "x", policy("{namespace: ops}", "{pathPrefix: a}"), "write an absolute path"},
		{"HTTPFilter", "x", "{rbac: {policies: [{name: p, principals: [{namespace: ops}]}, {name: p, principals: [{namespace: ops}]}]}}", "uplicate"},
		{"HTTPFilter", "x", "{extAuthz: {disabled: true, contextExtensions: {a: b}}}", "disabled excludes contextExtensions"},
		{"HTTPFilter", "x", "{headerToMetadata: {rules: [{header: 'x v', metadataKey: v}]}}", "spec.headerToMetadata.rules[0].header"},
		{"EndpointPolicy", "x", "{targetRef: {kind: Pod, name: cart}, udsSocket: a/b}", "the target must be a Service"},
		{"EndpointPolicy", "x", "{targetRef: {kind: Service, name: cart}, udsSocket: a/b/c}", "write <volume>/<file>"},
		{"EndpointPolicy", "x", "{targetRef: {kind: Service, name: cart}, udsSocket: " + strings.Repeat("a", 65) + "/b}", "Too long"},
		{"EndpointPolicy", "x", "{targetRef: {kind: Service, name: cart}, udsSocket: app/" + strings.Repeat("a", 55) + "}", "54 bytes at most"},
		{"EndpointPolicy", "x", "{targetRef: {kind: Service, name: cart}, udsSocket: app/..}", "plain names"},
		{"EndpointPolicy", "x", "{targetRef: {kind: Service, name: cart}, udsSocket: ./app}", "plain names"},
		{"MeshConfig", "other", "{}", "its name is default"},
		{"MeshConfig", "default", "{routeSemantics: Both}", `supported values: "Aether", "GatewayAPI"`},
		{"MeshConfig", "default", "{hopSource: host}", `supported values: "pod", "node"`},
		{"MeshConfig", "default", "{proxy: {accessLogSuccessSampleRate: 101}}", "less than or equal to 100"},
		{"MeshConfig", "default", "{proxy: {traceSampleRate: 1.5}}", "less than or equal to 1"},

		{"HTTPFilter", "good-1", "{scope: SCOPE_INBOUND, targetRefs: [{kind: Service, group: core, name: cart}], rbac: {mode: MODE_AUDIT, action: DENY, policies: [{name: p, principals: [{spiffeId: 'spiffe://td/ns/a/sa/b'}, {namespace: ops}], permissions: [{pathPrefix: /é}, {method: GET}]}]}}", ""},
		{"HTTPFilter", "good-2", "{scope: SCOPE_CHAIN, targetRefs: [{kind: Service, group: '', name: cart}], extAuthz: {contextExtensions: {a: b}, disableRequestBodyBuffering: true}}", ""},
		{"HTTPFilter", "good-3", "{headerToMetadata: {rules: [{header: X-V, metadataKey: v, metadataNamespace: other}]}}", ""},
		{"EndpointPolicy", "good", "{targetRef: {kind: Service, name: cart}, udsSocket: app/http.sock}", ""},
		{"EndpointPolicy", "good-2", "{targetRef: {kind: Service, name: cart}, udsSocket: .app/..." + strings.Repeat("a", 51) + "}", ""},
		{"MeshConfig", "default", "{routeSemantics: Aether, sameNode: mTLS, hopSource: pod, proxy: {traceSampleRate: 1}}", ""},
	} {
		err := s.try(t, fmt.Sprintf("%s %s/%s\nspec: %s", tt.kind, ns, tt.name, tt.spec))
		switch {
		case tt.want == "" && err != nil:
			t.Errorf("%s %s is refused: %v", tt.kind, tt.spec, err)
		case tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)):
			t.Errorf("%s %s: %v\nwant %q", tt.kind, tt.spec, err, tt.want)
		}
	}
	for _, kind := range []string{"HTTPFilter", "EndpointPolicy", "MeshConfig"} {
		r := s.objects.Resource(resources[kind]).Namespace(ns)
		list, err := r.List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range list.Items {
			if m, _ := apimeta.Accessor(&o); strings.HasPrefix(m.GetName(), "good") || kind == "MeshConfig" {
				s.delete(t, kind, ns, m.GetName())
			}
		}
	}
}

// TestSmallerRoles: what may not be read is said, with what mends it, and costs no more
// than what hangs on it.
func TestSmallerRoles(t *testing.T) {
	s := start(t)
	without := func(group string) *rbacv1.ClusterRole {
		r := role(t)
		r.Rules = slices.DeleteFunc(r.Rules, func(p rbacv1.PolicyRule) bool { return slices.Contains(p.APIGroups, group) })
		return r
	}
	ns := s.Namespace(t)
	s.apply(t, "Service "+ns+"/user\nspec: {clusterIP: 10.96.2.1, ports: [{name: web, port: 80, targetPort: http}, {name: num, port: 82, targetPort: 8082}]}")
	s.apply(t, "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {namespace: "+ns+", name: a, labels: {kubernetes.io/service-name: user}}\naddressType: IPv4\nendpoints: [{addresses: [10.0.0.1]}]\nports: [{name: web, port: 8080}]")
	object := "Service " + ns + "/user"
	target := func(b *input.Batch) string {
		x := b.Services[model.ServiceName{Namespace: ns, Name: "user"}]
		if len(x) != 1 {
			return "none"
		}
		return fmt.Sprint(x[0].Ports[0].Target, x[0].Ports[1].Target)
	}
	t.Run("no EndpointSlices", func(t *testing.T) {
		r := without("discovery.k8s.io")
		c := s.as(t, r)
		_, got := run(t, c, "")
		got.wait(t, "refused", func(b *input.Batch, st input.Status) string {
			if target(b) != "0 8082" || st.Connected || !strings.Contains(st.Err, "EndpointSlice: ") || !strings.Contains(st.Err, "rbac.yaml") {
				return target(b) + ", " + st.Err
			}
			return problem(object, "the Service's EndpointSlices are not known: ")(b, st)
		})
		// The role is mended: tried again within 30 s.
		whole := role(t)
		whole.Name = r.Name
		if _, err := s.Client(t).RbacV1().ClusterRoles().Update(t.Context(), whole, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		got.wait(t, "resolved", func(b *input.Batch, st input.Status) string {
			if target(b) != "8080 8082" || !st.Connected {
				return target(b) + ", " + st.Err
			}
			return problem(object, "")(b, st)
		})
	})
	t.Run("no names of CRDs", func(t *testing.T) {
		src, got := run(t, s.as(t, without("apiextensions.k8s.io")), "")
		got.wait(t, "synced, and it is said", func(b *input.Batch, st input.Status) string {
			if target(b) != "8080 8082" || st.Connected || !strings.Contains(st.Err, "CustomResourceDefinition: ") {
				return target(b) + ", " + st.Err
			}
			return ""
		})
		s.crds(t, "crd/config.aether.io_httpfilters.yaml")
		s.apply(t, "HTTPFilter "+ns+"/f\nspec: {extAuthz: {disabled: true}}")
		got.wait(t, "found by trying again", func(b *input.Batch, _ input.Status) string {
			if len(b.Filters) != 1 {
				return fmt.Sprintf("%+v", kindOf(src, "HTTPFilter"))
			}
			return ""
		})
	})
}
