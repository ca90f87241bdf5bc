package kube_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"k8s.io/client-go/rest"

	"aether/controlplane/input"
	"aether/controlplane/kube"
	"aether/dataplane/model"
	"aether/e2e/rig"
)

// faulty is as much of an API server as faults need that a real one cannot be brought
// to: lists by path, and watches that say nothing and end when a list changes.
type faulty struct {
	*httptest.Server
	mu      sync.Mutex
	lists   map[string]answer // by path
	version int               // grows with every change: the resourceVersion of all lists
	changed chan struct{}     // closed and replaced by set
}

// answer is a status and, where it is 200, the items of a list.
type answer struct {
	status int
	items  []string
}

func startFaulty(t *testing.T, lists map[string]answer) *faulty {
	f := &faulty{lists: lists, version: 1, changed: make(chan struct{})}
	f.Server = httptest.NewServer(f)
	t.Cleanup(f.Close)
	return f
}

// set changes an answer, and ends all watches.
func (f *faulty) set(path string, a answer) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lists[path] = a
	f.version++
	close(f.changed)
	f.changed = make(chan struct{})
}

func (f *faulty) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	f.mu.Lock()
	a, ok := f.lists[q.URL.Path]
	version, changed := strconv.Itoa(f.version), f.changed
	f.mu.Unlock()
	if !ok {
		a.status = http.StatusNotFound
	}
	refuse := func(status int) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		reason := map[int]string{404: "NotFound", 403: "Forbidden", 422: "Invalid"}[status]
		fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":%q,"code":%d,"message":"as the test says"}`, reason, status)
	}
	switch watch := q.URL.Query().Get("watch") != ""; {
	case a.status != http.StatusOK:
		refuse(a.status)
	case watch && q.URL.Query().Get("sendInitialEvents") != "":
		refuse(http.StatusUnprocessableEntity) // an older server
	case watch:
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusOK)
		w.(http.Flusher).Flush()
		if q.URL.Query().Get("resourceVersion") == version { // else there was a change since the list
			select {
			case <-changed:
			case <-q.Context().Done():
			}
		}
		// As one whose history was compacted: list again.
		fmt.Fprint(w, `{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Expired","code":410,"message":"too old resource version"}}`)
	default:
		w.Header().Set("Content-Type", "application/json")
		kind := map[string]string{"services": "ServiceList", "pods": "PodList", "customresourcedefinitions": "PartialObjectMetadataList"}[q.URL.Path[strings.LastIndexByte(q.URL.Path, '/')+1:]]
		apiVersion := "v1"
		switch kind {
		case "":
			kind, apiVersion = "List", "config.aether.io/v1"
		case "PartialObjectMetadataList":
			apiVersion = "meta.k8s.io/v1"
		}
		fmt.Fprintf(w, `{"kind":%q,"apiVersion":%q,"metadata":{"resourceVersion":%q},"items":[%s]}`, kind, apiVersion, version, strings.Join(a.items, ","))
	}
}

const (
	servicesPath = "/api/v1/services"
	crdsPath     = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
	filtersPath  = "/apis/config.aether.io/v1/httpfilters"
	filterObject = `{"apiVersion":"config.aether.io/v1","kind":"HTTPFilter","metadata":{"namespace":"shop","name":"f","resourceVersion":"1"},"spec":{"extAuthz":{"disabled":true}}}`
)

func crd(name string) string {
	b, _ := json.Marshal(map[string]any{"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": map[string]any{"name": name, "resourceVersion": "1"}})
	return string(b)
}

// TestNotFoundTakesNothing: that a list is not found makes a kind inert only where its
// CRD is seen to be gone. A server that answers so for another reason takes no policy away.
func TestNotFoundTakesNothing(t *testing.T) {
	ok := func(items ...string) answer { return answer{http.StatusOK, items} }
	filter := model.ServiceName{Namespace: "shop", Name: "f"}
	kept := func(b *input.Batch, _ input.Status) string {
		if len(b.Filters[filter]) != 1 {
			return "the filter is gone"
		}
		return ""
	}
	state := func(src *kube.Source, want kube.Kind) func(context.Context) error {
		return func(context.Context) error {
			k := kindOf(src, "HTTPFilter")
			if k.Inert != want.Inert || k.Listed != want.Listed || k.Objects != want.Objects || (k.Err == "") != (want.Err == "") {
				return fmt.Errorf("%+v", k)
			}
			return nil
		}
	}
	until := func(t *testing.T, what string, f func(context.Context) error) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		if err := rig.Until(ctx, f); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}

	t.Run("while the CRD is there", func(t *testing.T) {
		f := startFaulty(t, map[string]answer{servicesPath: ok(), crdsPath: ok(crd("httpfilters.config.aether.io")), filtersPath: ok(filterObject)})
		src, got := run(t, &rest.Config{Host: f.URL}, "")
		got.wait(t, "synced", kept)
		f.set(filtersPath, answer{status: http.StatusNotFound})
		until(t, "not found is an error", state(src, kube.Kind{Listed: true, Objects: 1, Err: "x"}))
		got.wait(t, "kept", kept)
		f.set(crdsPath, answer{status: http.StatusForbidden})
		got.wait(t, "the names cannot be read any more", func(b *input.Batch, st input.Status) string {
			if !strings.Contains(st.Err, "CustomResourceDefinition: ") {
				return st.Err
			}
			return kept(b, st)
		})
		until(t, "still an error", state(src, kube.Kind{Listed: true, Objects: 1, Err: "x"}))
		f.set(crdsPath, ok())
		got.wait(t, "the CRD is seen to be gone", func(b *input.Batch, _ input.Status) string { return gone(b.Filters[filter]) })
		until(t, "inert", state(src, kube.Kind{Inert: true}))
		f.set(filtersPath, ok(filterObject))
		f.set(crdsPath, ok(crd("httpfilters.config.aether.io")))
		got.wait(t, "back", kept)
	})
	t.Run("nothing is published before the CRDs are known", func(t *testing.T) {
		f := startFaulty(t, map[string]answer{servicesPath: ok(), crdsPath: {status: http.StatusInternalServerError}, filtersPath: {status: http.StatusServiceUnavailable}})
		src, got := run(t, &rest.Config{Host: f.URL}, "")
		until(t, "it was tried", func(context.Context) error {
			if i := slices.IndexFunc(src.Kinds(), func(k kube.Kind) bool { return k.Kind == "HTTPRoute" && k.Inert }); i < 0 {
				return fmt.Errorf("%+v", src.Kinds())
			}
			return state(src, kube.Kind{Err: "x"})(nil)
		})
		got.mu.Lock()
		replaced := got.replaced
		got.mu.Unlock()
		if replaced != 0 {
			t.Error("a state was said to be whole while a kind could not be listed")
		}
		f.set(crdsPath, ok(crd("httpfilters.config.aether.io")))
		f.set(filtersPath, ok(filterObject))
		got.wait(t, "synced", kept)
	})
}

const (
	gatewayPath = "/apis/gateway.networking.k8s.io/"
	tcpObject   = `{"apiVersion":"gateway.networking.k8s.io/v1alpha2","kind":"TCPRoute","metadata":{"namespace":"shop","name":"t","resourceVersion":"1"},"spec":{"parentRefs":[{"kind":"Service","group":"","name":"db"}],"rules":[{"backendRefs":[{"name":"db","port":9000}]}]}}`
	grpcObject  = `{"apiVersion":"gateway.networking.k8s.io/v1alpha2","kind":"GRPCRoute","metadata":{"namespace":"shop","name":"g","resourceVersion":"1"},"spec":{"parentRefs":[{"kind":"Service","group":"","name":"cart"}],"rules":[{"matches":[{"method":{"service":"shop.Cart"}}],"backendRefs":[{"name":"cart","port":80}]}]}}`
)

// TestVersionsThatAreNotRead: a CRD that has none of the versions that are read is a problem, and its kind inert until
// it has one; only where that would widen access nothing is published.
func TestVersionsThatAreNotRead(t *testing.T) {
	ok := func(items ...string) answer { return answer{http.StatusOK, items} }
	said := func(crd, text string) func(b *input.Batch, st input.Status) string {
		return func(b *input.Batch, st input.Status) string {
			p := b.Problems["CustomResourceDefinition "+crd]
			if text == "" && len(p) == 0 || len(p) == 1 && text != "" && strings.Contains(p[0].Reason, text) {
				return ""
			}
			return fmt.Sprintf("%+v, %+v", p, st)
		}
	}
	route := func(k model.RouteKind, name string) func(b *input.Batch, st input.Status) string {
		return func(b *input.Batch, st input.Status) string {
			if len(b.Routes[input.RouteKey{Kind: k, Namespace: "shop", Name: name}]) != 1 {
				return "it is not there"
			}
			return ""
		}
	}
	t.Run("inert, and alive once it has one", func(t *testing.T) {
		const crdName = "tcproutes.gateway.networking.k8s.io"
		f := startFaulty(t, map[string]answer{servicesPath: ok(), crdsPath: ok(crd(crdName))})
		src, got := run(t, &rest.Config{Host: f.URL}, "")
		got.wait(t, "a problem", said(crdName, "without a version that this program reads (v1, v1alpha2)"))
		if k := kindOf(src, "TCPRoute"); !k.Inert || k.Err != "" {
			t.Errorf("%+v", k)
		}
		f.set(gatewayPath+"v1alpha2/tcproutes", ok(tcpObject))
		f.set(crdsPath, ok(crd(crdName)))
		got.wait(t, "alive", route(model.TCPRoute, "t"))
		got.wait(t, "no problem any more", said(crdName, ""))
	})
	t.Run("a GRPCRoute from before its v1", func(t *testing.T) {
		f := startFaulty(t, map[string]answer{
			servicesPath: ok(), crdsPath: ok(crd("grpcroutes.gateway.networking.k8s.io"), crd("httpfilters.config.aether.io")), filtersPath: ok(filterObject),
			gatewayPath + "v1alpha2/grpcroutes": ok(grpcObject),
		})
		_, got := run(t, &rest.Config{Host: f.URL}, "")
		got.wait(t, "read", route(model.GRPCRoute, "g"))
	})
	for _, tt := range []struct {
		name, crd string
		filters   answer
		closed    bool
	}{
		{"HTTPFilters", "httpfilters.config.aether.io", answer{status: http.StatusNotFound}, true},
		{"routes that may name filters", "httproutes.gateway.networking.k8s.io", ok(filterObject), true},
		{"routes, and no filter is there", "httproutes.gateway.networking.k8s.io", ok(), false},
		{"routes that carry no filters", "tlsroutes.gateway.networking.k8s.io", ok(filterObject), false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := startFaulty(t, map[string]answer{servicesPath: ok(), crdsPath: ok(crd(tt.crd), crd("httpfilters.config.aether.io")), filtersPath: tt.filters})
			src, got := run(t, &rest.Config{Host: f.URL}, "")
			if !tt.closed {
				got.wait(t, "published, with a problem", said(tt.crd, "without a version that this program reads"))
				return
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			if err := rig.Until(ctx, func(context.Context) error {
				for _, k := range src.Kinds() {
					if strings.Contains(k.Err, "nothing is published before they can be read") {
						return nil
					}
				}
				return fmt.Errorf("%+v", src.Kinds())
			}); err != nil {
				t.Fatal(err)
			}
			got.mu.Lock()
			replaced := got.replaced
			got.mu.Unlock()
			if replaced != 0 {
				t.Error("a state was said to be whole without what may be policy")
			}
		})
	}
}
