// A plain reverse proxy on the standard library's httputil.ReverseProxy, as llama-swap has: what llmux is compared with.
package main

import (
	"flag"
	"log"
	"net/http"
	"net/http/httputil"
	"net/url"
)

func main() {
	listen := flag.String("listen", "", "HOST:PORT")
	upstream := flag.String("upstream", "", "URL")
	flag.Parse()
	target, err := url.Parse(*upstream)
	if err != nil {
		log.Fatal(err)
	}
	proxy := httputil.NewSingleHostReverseProxy(target)
	proxy.FlushInterval = -1 // each chunk at once
	proxy.Transport = &http.Transport{MaxIdleConnsPerHost: 256, DisableCompression: true}
	log.Fatal(http.ListenAndServe(*listen, proxy))
}
